// Attention over a paged cache: the new keys and values are written, then jobs are shared out among the threads.
//
// A job is some tokens of one sequence with the heads that share a kv head, so that keys and values are read once for
// all of them, and walks tiles of 128 positions in ascending order. Few long rows (decode) are cut into jobs of some
// tiles each, whose parts are added up in that same order. How the work is cut depends on the batch; the result does
// not.
#include "worker.h"

namespace llmc::LLMC_ISA {
namespace {

// Rows of a job: enough to pay for the reading of a tile, few enough to stay in the nearest caches.
constexpr std::int64_t kJobRows = 96, kFewestJobRows = 24;
// Below so many multiplications the calling thread works alone.
constexpr std::int64_t kAlone = 1 << 16;

class JobList {
 public:
  JobList(const Step& step, int threads) : step_(step), threads_(threads) {
    const Batch& batch = step.context.batch;
    const std::int64_t rows = batch.tokens * step.heads;
    job_rows_ = std::clamp(rows / (4 * threads), kFewestJobRows, kJobRows);
    for (std::int64_t s = 0; s < batch.sequences; ++s) count(sequence_of(batch, s));
    limit_ = threads == 1 ? std::numeric_limits<std::int64_t>::max() : cost_ / (8 * threads) + 1;
    jobs_ = step.context.scratch.array<Job>(most_jobs_);
    for (std::int64_t s = 0; s < batch.sequences; ++s) add(sequence_of(batch, s), static_cast<std::int32_t>(s));
  }

  std::int64_t size() const { return size_; }
  const Job& operator[](std::int64_t i) const { return jobs_[i]; }
  std::int64_t cost() const { return cost_; }
  std::int64_t longest() const { return longest_; }  // tokens of a job

 private:
  struct Tokens {
    std::int64_t first, count;
    Range range;        // what any of them sees
    std::int64_t cost;  // positions x rows
  };

  std::int64_t tokens_per_job(const Sequence& sequence, bool chain) const {
    return chain ? std::min(std::max<std::int64_t>(1, job_rows_ / step_.group), sequence.rows) : 1;
  }

  Tokens tokens_at(const Sequence& sequence, std::int64_t first, std::int64_t count) const {
    Tokens tokens{first, count, visible(step_, sequence, first), 0};
    for (std::int64_t t = 0; t < count; ++t) {
      const Range range = visible(step_, sequence, first + t);
      tokens.range.begin = std::min(tokens.range.begin, range.begin);
      tokens.range.end = std::max(tokens.range.end, range.end);
    }
    tokens.cost = (tokens.range.end - tokens.range.begin) * count * step_.group;
    return tokens;
  }

  // Tokens with the longest past come first, so that the last jobs of a step are short.
  template <class F>
  void for_each_tokens(const Sequence& sequence, bool chain, F&& f) const {
    if (sequence.rows == 0) return;
    const std::int64_t step = tokens_per_job(sequence, chain);
    for (std::int64_t end = sequence.rows; end > 0; end -= std::min(end, step)) {
      const std::int64_t first = std::max<std::int64_t>(0, end - step);
      f(tokens_at(sequence, first, end - first));
    }
  }

  static std::int64_t first_tile(const Tokens& tokens) { return tokens.range.begin / kTile; }
  static std::int64_t last_tile(const Tokens& tokens) { return (tokens.range.end + kTile - 1) / kTile; }

  void count(const Sequence& sequence) {
    for_each_tokens(sequence, is_chain(step_.context.batch, sequence), [&](const Tokens& tokens) {
      cost_ += tokens.cost * step_.slot.kv_heads;
      most_jobs_ += (last_tile(tokens) - first_tile(tokens)) * step_.slot.kv_heads;
      longest_ = std::max(longest_, tokens.count);
    });
  }

  // Jobs of one head follow one another: its keys and values are still in the caches.
  void add(const Sequence& sequence, std::int32_t s) {
    const bool chain = is_chain(step_.context.batch, sequence);
    for (std::int64_t head = 0; head < step_.slot.kv_heads; ++head) {
      for_each_tokens(sequence, chain, [&](const Tokens& tokens) {
        const std::int64_t first = first_tile(tokens), last = last_tile(tokens);
        const std::int64_t parts = std::clamp((tokens.cost + limit_ - 1) / limit_, std::int64_t{1}, last - first);
        Split* split = parts > 1 ? make_split(tokens, first, last - first, parts) : nullptr;
        for (std::int64_t part = 0; part < parts; ++part) {
          const std::int64_t from = first + (last - first) * part / parts,
                             to = first + (last - first) * (part + 1) / parts;
          jobs_[size_++] = {s,
                            static_cast<std::int32_t>(head),
                            static_cast<std::int32_t>(tokens.first),
                            static_cast<std::int32_t>(tokens.count),
                            static_cast<std::int32_t>(from),
                            static_cast<std::int32_t>(to),
                            !chain,
                            split};
        }
      });
    }
  }

  Split* make_split(const Tokens& tokens, std::int64_t first, std::int64_t tiles, std::int64_t parts) {
    Scratch& scratch = step_.context.scratch;
    const std::int64_t rows = tokens.count * step_.group;
    Split* split = new (scratch.get(sizeof(Split))) Split{};
    split->jobs_left = static_cast<std::int32_t>(parts);
    split->first_tile = first;
    split->tiles = tiles;
    split->seen = scratch.array<Seen>(tiles);
    const std::int64_t padded = (rows + kLanes - 1) / kLanes * kLanes;
    float* memory = scratch.array<float>(tiles * (2 * padded + rows * step_.width));
    for (std::int64_t t = 0; t < tiles; ++t, memory += 2 * padded + rows * step_.width) {
      split->seen[t] = {memory, memory + padded, memory + 2 * padded};
    }
    return split;
  }

  const Step& step_;
  const int threads_;
  std::int64_t job_rows_, cost_ = 0, limit_ = 0, most_jobs_ = 0, longest_ = 0, size_ = 0;
  Job* jobs_ = nullptr;
};

class PagedAttention : public Kernel {
 public:
  explicit PagedAttention(const Attributes& attributes)
      : slot_(attributes.integer("slot")),
        write_(attributes.flag("write")),
        scale_(static_cast<float>(attributes.real("scale"))),
        softcap_(static_cast<float>(attributes.real("softcap"))),
        window_(attributes.integer("window")),
        chunk_(attributes.integer("chunk")) {}

  void run(const Context& context) override {
    const KvSlot& slot = check(context);
    if (context.batch.tokens == 0) return;
    switch (slot.dtype) {
      case DType::f32:
        return typed<float>(context, slot);
      case DType::bf16:
        return typed<bf16>(context, slot);
      case DType::f16:
        return typed<f16>(context, slot);
      default:
        fail("the cache must be float32, bfloat16 or float16");
    }
  }

 private:
  const KvSlot& check(const Context& context) const {
    require(context.in.size() == 5 && context.out.size() == 1, "expected q, k, v, sinks?, slopes? -> y");
    require(slot_ >= 0 && slot_ < static_cast<std::int64_t>(context.kv.slots.size()), "no such slot");
    const KvSlot& slot = context.kv.slots[static_cast<std::size_t>(slot_)];
    const Tensor &q = context.in[0], &k = context.in[1], &v = context.in[2], &y = context.out[0];
    const std::int64_t rows = context.batch.tokens;
    const auto fits = [](const Tensor& x, std::int64_t a, std::int64_t b, std::int64_t c) {
      return x.dtype == DType::f32 && x.ndim == 3 && x.shape[0] == a && x.shape[1] == b && x.shape[2] == c;
    };
    require(q.ndim == 3 && q.shape[1] > 0 && q.shape[1] % slot.kv_heads == 0, "kv heads must divide q's heads");
    require(fits(q, rows, q.shape[1], slot.key_dim), "q must be float32 [T, heads, key_dim]");
    require(fits(y, rows, q.shape[1], slot.value_dim) && y.stride[2] == 1,
            "y must be float32 [T, heads, value_dim], contiguous in value_dim");
    if (write_) {
      require(fits(k, rows, slot.kv_heads, slot.key_dim), "k must be float32 [T, kv_heads, key_dim]");
      require(fits(v, rows, slot.kv_heads, slot.value_dim), "v must be float32 [T, kv_heads, value_dim]");
    }
    for (const Tensor* x : {&context.in[3], &context.in[4]}) {
      if (!*x) continue;
      require(x->dtype == DType::f32 && x->ndim == 1 && x->shape[0] == q.shape[1],
              "sinks and slopes must be float32 [heads]");
    }
    require(context.kv.block_size % kLanes == 0, "the block size must be a multiple of 16");
    return slot;
  }

  template <class T>
  void typed(const Context& context, const KvSlot& slot) const {
    if (write_) write<T>(context, slot);
    const std::int64_t heads = context.in[0].shape[1];
    const Step step{context,
                    slot,
                    {scale_, softcap_, 0},
                    window_,
                    chunk_,
                    heads,
                    heads / slot.kv_heads,
                    slot.key_dim,
                    slot.value_dim,
                    (slot.value_dim + kLanes - 1) / kLanes * kLanes};
    const JobList jobs(step, context.pool.size());
    const Batch& batch = context.batch;
    std::int64_t branch_rows = 0;
    for (std::int64_t s = 0; batch.tree_mask != nullptr && s < batch.sequences; ++s) {
      branch_rows = std::max(branch_rows, sequence_of(batch, s).rows);
    }
    const typename Worker<T>::Sizes sizes{jobs.longest() * step.group, jobs.longest(), branch_rows};
    const std::size_t bytes = Worker<T>::memory(step, sizes);
    const bool alone = jobs.size() == 1 || jobs.cost() * (slot.key_dim + slot.value_dim) < kAlone;
    const int threads = alone ? 1 : context.pool.size();
    std::byte* memory = static_cast<std::byte*>(context.scratch.get(bytes * static_cast<std::size_t>(threads)));
    std::atomic<std::int64_t> next{0};
    auto work = [&](int thread) {
      Worker<T> worker(step, sizes, memory + bytes * static_cast<std::size_t>(thread));
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < jobs.size();) worker.run(jobs[i]);
    };
    if (alone) {
      work(0);
    } else {
      context.pool.on_all(work);
    }
  }

  // Threads write whole pages of a sequence's new rows where there are many.
  template <class T>
  void write(const Context& context, const KvSlot& slot) const {
    const CacheView<T> cache(context.kv, slot);
    const std::int64_t buffer_size = (std::max(slot.key_dim, slot.value_dim) + kLanes - 1) / kLanes * kLanes;
    T* buffers = context.scratch.array<T>(context.pool.size() * buffer_size);
    const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
      write_rows(cache, context.batch, context.in[1], context.in[2], begin, end, buffers + thread * buffer_size);
    };
    const std::int64_t rows = context.batch.tokens;
    if (rows * slot.kv_heads * (slot.key_dim + slot.value_dim) < kAlone / 4) {
      range(0, rows, 0);
    } else {
      context.pool.split(rows, kLanes, range);
    }
  }

  const std::int64_t slot_;
  const bool write_;
  const float scale_, softcap_;
  const std::int64_t window_, chunk_;
};

}  // namespace
}  // namespace llmc::LLMC_ISA

LLMC_KERNEL(paged_attention, PagedAttention)
