// Streams, events and graphs.
#include <algorithm>

#include "state.h"

namespace fake {

constexpr unsigned kNonBlocking = 1;
constexpr uintptr_t kSpecialHandles = 2;  // the legacy and the per-thread default stream

Stream* stream_of(void* handle) {
  return reinterpret_cast<uintptr_t>(handle) <= kSpecialHandles ? &state().null_stream : static_cast<Stream*>(handle);
}

bool capturing() {
  const auto& all = state().streams;
  return std::any_of(all.begin(), all.end(), [](const Stream* s) { return s->capture != nullptr; });
}

int enqueue(void* handle, Work work) {
  Stream* stream = stream_of(handle);
  (stream->capture ? stream->capture->works : stream->queue).push_back(std::move(work));
  return kSuccess;
}

int drain(Stream* stream) {
  auto works = std::move(stream->queue);
  stream->queue.clear();
  for (const Work& work : works) {
    if (state().sticky == kSuccess) state().sticky = work();
  }
  return state().sticky;
}

int drain_blocking() {
  drain(&state().null_stream);
  for (Stream* stream : state().streams) {
    if (stream->blocking) drain(stream);
  }
  return state().sticky;
}

static int stream_create(void** stream, unsigned flags) {
  FAKE_CALL;
  auto* made = new Stream;
  made->blocking = !(flags & kNonBlocking);
  state().streams.push_back(made);
  *stream = made;
  return kSuccess;
}

static int stream_destroy(void* handle) {
  FAKE_LOCK;
  Stream* stream = stream_of(handle);
  drain(stream);
  auto& all = state().streams;
  all.erase(std::remove(all.begin(), all.end(), stream), all.end());
  delete stream;
  return kSuccess;
}

static int stream_synchronize(void* handle) {
  FAKE_CALL;
  ++state().waits;
  Stream* stream = stream_of(handle);
  if (stream->capture) return kCaptureUnsupported;
  if (stream == &state().null_stream) return drain_blocking();
  if (stream->blocking) drain(&state().null_stream);
  return drain(stream);
}

// Each question lets one piece of work happen.
static int stream_query(void* handle) {
  FAKE_CALL;
  Stream* stream = stream_of(handle);
  if (stream->capture) return kCaptureUnsupported;
  if (stream->queue.empty()) return kSuccess;
  Work work = std::move(stream->queue.front());
  stream->queue.erase(stream->queue.begin());
  state().sticky = work();
  if (state().sticky != kSuccess) return state().sticky;
  return stream->queue.empty() ? kSuccess : kNotReady;
}

static int host_function(void* stream, void (*function)(void*), void* data) {
  FAKE_CALL;
  return enqueue(stream, [=] {
    function(data);
    return kSuccess;
  });
}

static int begin_capture(void* handle, int) {
  FAKE_CALL;
  Stream* stream = stream_of(handle);
  if (stream == &state().null_stream || stream->capture) return kCaptureUnsupported;
  stream->capture = new Graph;
  return kSuccess;
}

static int end_capture(void* handle, void** graph) {
  FAKE_CALL;
  Stream* stream = stream_of(handle);
  if (!stream->capture) return kCaptureInvalidated;
  *graph = stream->capture;
  stream->capture = nullptr;
  return kSuccess;
}

static int is_capturing(void* handle, int* status) {
  FAKE_CALL;
  *status = stream_of(handle)->capture != nullptr;
  return kSuccess;
}

static int graph_instantiate(void** executable, void* graph, unsigned long long) {
  FAKE_CALL;
  *executable = new Graph(*static_cast<Graph*>(graph));
  ++state().graphs;
  return kSuccess;
}

static int graph_launch(void* executable, void* handle) {
  FAKE_CALL;
  Stream* stream = stream_of(handle);
  if (stream->capture) return kCaptureUnsupported;
  const auto& works = static_cast<Graph*>(executable)->works;
  stream->queue.insert(stream->queue.end(), works.begin(), works.end());
  return kSuccess;
}

static int graph_upload(void*, void*) { return kSuccess; }

static int graph_destroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kSuccess;
}

static int executable_destroy(void* graph) {
  FAKE_LOCK;
  --state().graphs;
  return graph_destroy(graph);
}

static int event_create(void** event, unsigned) {
  FAKE_CALL;
  *event = new Event;
  return kSuccess;
}

static int event_destroy(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}

static int event_record(void* handle, void* stream) {
  FAKE_CALL;
  auto* event = static_cast<Event*>(handle);
  event->done = false;
  return enqueue(stream, [event] {
    event->done = true;
    return kSuccess;
  });
}

// Works of any stream, until the event has happened.
static int wait_for(Event* event) {
  State& s = state();
  std::vector<Stream*> all = s.streams;
  all.push_back(&s.null_stream);
  for (Stream* stream : all) {
    if (!event->done) drain(stream);
  }
  return s.sticky;
}

static int event_synchronize(void* event) {
  FAKE_CALL;
  return wait_for(static_cast<Event*>(event));
}

static int event_query(void* event) {
  FAKE_CALL;
  if (static_cast<Event*>(event)->done) return kSuccess;
  int status = wait_for(static_cast<Event*>(event));
  return status == kSuccess ? kNotReady : status;
}

static int event_elapsed(float* milliseconds, void*, void*) {
  *milliseconds = 1.0f;
  return kSuccess;
}

static int stream_wait(void* stream, void* event, unsigned) {
  FAKE_CALL;
  return enqueue(stream, [event] { return wait_for(static_cast<Event*>(event)); });
}

void add_streams(Table& t) {
  t["cuStreamCreate"] = reinterpret_cast<void*>(stream_create);
  t["cuStreamDestroy"] = reinterpret_cast<void*>(stream_destroy);
  t["cuStreamSynchronize"] = reinterpret_cast<void*>(stream_synchronize);
  t["cuStreamQuery"] = reinterpret_cast<void*>(stream_query);
  t["cuStreamWaitEvent"] = reinterpret_cast<void*>(stream_wait);
  t["cuStreamBeginCapture"] = reinterpret_cast<void*>(begin_capture);
  t["cuStreamEndCapture"] = reinterpret_cast<void*>(end_capture);
  t["cuStreamIsCapturing"] = reinterpret_cast<void*>(is_capturing);
  t["cuLaunchHostFunc"] = reinterpret_cast<void*>(host_function);
  t["cuGraphInstantiate"] = reinterpret_cast<void*>(graph_instantiate);
  t["cuGraphInstantiateWithFlags"] = reinterpret_cast<void*>(graph_instantiate);
  t["cuGraphUpload"] = reinterpret_cast<void*>(graph_upload);
  t["cuGraphLaunch"] = reinterpret_cast<void*>(graph_launch);
  t["cuGraphDestroy"] = reinterpret_cast<void*>(graph_destroy);
  t["cuGraphExecDestroy"] = reinterpret_cast<void*>(executable_destroy);
  t["cuEventCreate"] = reinterpret_cast<void*>(event_create);
  t["cuEventDestroy"] = reinterpret_cast<void*>(event_destroy);
  t["cuEventRecord"] = reinterpret_cast<void*>(event_record);
  t["cuEventSynchronize"] = reinterpret_cast<void*>(event_synchronize);
  t["cuEventQuery"] = reinterpret_cast<void*>(event_query);
  t["cuEventElapsedTime"] = reinterpret_cast<void*>(event_elapsed);
}

}  // namespace fake
