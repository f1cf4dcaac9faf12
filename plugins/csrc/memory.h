// Memory of executors: pages from the system, scratch space, the KV cache.
#pragma once
#include <string>

#include "kernel.h"

namespace llmc {

std::size_t item_size(DType dtype);
DType dtype_of(const std::string& name);  // "float32", "bfloat16", ...
const char* dtype_name(DType dtype);
KvType kv_type_of(const std::string& name);  // "float32", ..., "int4"

// Zeroed pages that take up memory when they are first written.
class Pages {
 public:
  Pages() = default;
  explicit Pages(std::size_t bytes);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Hands out one block front to back; what does not fit comes from extra blocks, and the next reset() makes one large
// enough for all.
class ScratchPages final : public Scratch {
 public:
  // With poison, what is handed out is filled with NaN.
  explicit ScratchPages(bool poison) : poison_(poison) {}
  void* get(std::size_t bytes) override;
  void reset();

 private:
  Pages block_;
  std::vector<Pages> extra_;
  std::size_t used_ = 0, wanted_ = 0;
  const bool poison_;
};

struct KvShape {
  std::int64_t kv_heads = 0, key_dim = 0, value_dim = 0;
};

// The memory behind a KvCache.
class KvMemory {
 public:
  KvMemory(const std::vector<KvShape>& slots, KvType type, std::int64_t block_size, std::int64_t blocks);
  KvMemory(KvMemory&&) = default;
  KvMemory(const KvMemory&) = delete;

  KvCache& cache() { return cache_; }
  std::int64_t block_size() const { return cache_.block_size; }
  std::int64_t blocks() const { return cache_.blocks; }
  std::size_t slots() const { return cache_.slots.size(); }
  // Bytes of one block of a slot's keys and values.
  std::size_t key_bytes(const KvSlot& slot) const;
  std::size_t value_bytes(const KvSlot& slot) const;
  void copy_block(std::int64_t source, std::int64_t target);
  // Copies positions of a sequence, which has these blocks, to others, one after the other: sources[i] to targets[i].
  void move_positions(const std::int32_t* blocks, std::int64_t count, const std::int32_t* sources,
                      const std::int32_t* targets, std::int64_t moves);
  // Fills a block with NaN: who reads a position that was not written shows.
  void poison_block(std::int64_t block);

 private:
  std::size_t block_bytes(const KvSlot& slot, PageLayout page) const;
  void check_block(std::int64_t block) const;

  KvCache cache_;
  std::vector<Pages> pages_;
};

}  // namespace llmc
