// Attention over a paged cache: the new keys and values are written, then jobs are shared out among the threads.
//
// A job is some tokens of one sequence with the heads that share a kv head, so that keys and values are read once for
// all of them, and walks tiles of 128 positions in ascending order. Few long rows (decode) are cut into jobs of some
// tiles each, whose parts are added up in that same order. How the work is cut depends on the batch; the result does
// not.
#include "amx_rows.h"
#include "job_list.h"
#include "pair_rows.h"
#include "vector_rows.h"
#include "write_rows.h"

namespace llmc::LLMC_ISA {
namespace {

// Below so many multiplications the calling thread works alone.
constexpr std::int64_t kAlone = 1 << 16;

// What computes the rows of a job.
#if defined(__AMX_BF16__)
template <class T>
using Rows = std::conditional_t<std::is_same_v<T, bf16> || kQuantized<T>, AmxRows<T>, VectorRows<T>>;
#elif defined(__AVX512BF16__)
template <class T>
using Rows = std::conditional_t<std::is_same_v<T, bf16> || kQuantized<T>, PairRows<T>, VectorRows<T>>;
#else
template <class T>
using Rows = VectorRows<T>;
#endif

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
    switch (slot.type) {
      case KvType::f32:
        return typed<float>(context, slot);
      case KvType::bf16:
        return typed<bf16>(context, slot);
      case KvType::f16:
        return typed<f16>(context, slot);
      case KvType::e4m3:
        return typed<e4m3>(context, slot);
      case KvType::i8:
        return typed<i8>(context, slot);
      case KvType::i4:
        return typed<i4>(context, slot);
    }
  }

 private:
  const KvSlot& check(const Context& context) const {
    require(context.in.size() >= 5 && context.in.size() <= 10 && context.out.size() == 1,
            "expected q, k, v, sinks?, slopes?, key_center?, key_scale?, value_center?, value_scale?, key_feedback? -> "
            "y");
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
    for (std::size_t i = 5; i < std::min(context.in.size(), kKeyFeedback); ++i) {
      const Tensor& x = context.in[i];
      const std::int64_t dims = i < kValueShift ? slot.key_dim : slot.value_dim;
      require(!x || (x.dtype == DType::f32 && x.ndim == 2 && x.shape[0] == slot.kv_heads && x.shape[1] == dims &&
                     (dims == 1 || x.stride[1] == 1)),
              "centers and scales must be float32 [kv_heads, dim], contiguous in dim");
    }
    if (context.in.size() > kKeyFeedback && context.in[kKeyFeedback]) {
      const Tensor& x = context.in[kKeyFeedback];
      require(fits(x, slot.kv_heads, slot.key_dim, slot.key_dim) && x.stride[0] == slot.key_dim * slot.key_dim &&
                  x.stride[1] == slot.key_dim && (slot.key_dim == 1 || x.stride[2] == 1),
              "key_feedback must be float32 [kv_heads, key_dim, key_dim], contiguous");
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
    const JobList jobs(step, Rows<T>::kMostRows, context.pool.size());
    const Batch& batch = context.batch;
    std::int64_t branch_rows = 0;
    for (std::int64_t s = 0; batch.tree_mask != nullptr && s < batch.sequences; ++s) {
      branch_rows = std::max(branch_rows, sequence_of(batch, s).rows);
    }
    const JobSizes sizes{jobs.longest() * step.group, jobs.longest(), branch_rows};
    const std::size_t bytes = Rows<T>(step, sizes, nullptr).bytes();
    const bool alone = jobs.size() == 1 || jobs.cost() * (slot.key_dim + slot.value_dim) < kAlone;
    const int threads = alone ? 1 : context.pool.size();
    std::byte* memory = static_cast<std::byte*>(context.scratch.get(bytes * static_cast<std::size_t>(threads)));
    JobQueue queue{jobs.jobs(), jobs.size()};
    auto work = [&](int thread) {
      Rows<T> rows(step, sizes, memory + bytes * static_cast<std::size_t>(thread));
      while (const Job* job = queue.take()) rows.run(*job, queue);
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
    const std::int64_t bytes = write_bytes(context, cache);
    std::byte* buffers = context.scratch.array<std::byte>(context.pool.size() * bytes);
    const auto range = [&](std::int64_t begin, std::int64_t end, int thread) {
      write_rows(cache, context, begin, end, buffers + thread * bytes);
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
