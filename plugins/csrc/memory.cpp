#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <utility>

namespace llmc {
namespace {

constexpr struct {
  DType dtype;
  const char* name;
  std::size_t size;
} kTypes[] = {{DType::f32, "float32", 4}, {DType::bf16, "bfloat16", 2}, {DType::f16, "float16", 2},
              {DType::i32, "int32", 4},   {DType::i64, "int64", 8},     {DType::boolean, "bool", 1},
              {DType::u8, "uint8", 1}};

constexpr std::int64_t kMostDims = 1 << 20;

constexpr struct {
  KvType type;
  const char* name;
} kKvTypes[] = {{KvType::f32, "float32"},      {KvType::bf16, "bfloat16"}, {KvType::f16, "float16"},
                {KvType::e4m3, "float8_e4m3"}, {KvType::i8, "int8"},       {KvType::i4, "int4"}};

std::size_t product(std::size_t a, std::size_t b) {
  std::size_t result;
  if (__builtin_mul_overflow(a, b, &result)) throw std::bad_alloc();
  return result;
}

}  // namespace

std::size_t item_size(DType dtype) {
  for (const auto& type : kTypes) {
    if (type.dtype == dtype) return type.size;
  }
  fail("dtype out of range");
}

DType dtype_of(const std::string& name) {
  for (const auto& type : kTypes) {
    if (name == type.name) return type.dtype;
  }
  fail("there is no dtype '" + name + "'; known: float32, bfloat16, float16, int32, int64, bool, uint8");
}

const char* dtype_name(DType dtype) {
  for (const auto& type : kTypes) {
    if (type.dtype == dtype) return type.name;
  }
  fail("dtype out of range");
}

KvType kv_type_of(const std::string& name) {
  std::string known;
  for (const auto& type : kKvTypes) {
    if (name == type.name) return type.type;
    known += std::string(known.empty() ? "" : ", ") + type.name;
  }
  fail("keys and values can't be stored as '" + name + "'; known: " + known);
}

Pages::Pages(std::size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
}

Pages::~Pages() {
  if (data_ != nullptr) munmap(data_, size_);
}

Pages::Pages(Pages&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void* ScratchPages::get(std::size_t bytes) {
  const std::size_t rounded = product(bytes / 64 + 1, 64);
  std::byte* memory;
  if (rounded <= block_.size() - used_) {
    memory = block_.data() + used_;
    used_ += rounded;
  } else {
    memory = extra_.emplace_back(rounded).data();
  }
  wanted_ += rounded;
  if (poison_) std::memset(memory, 0xff, rounded);
  return memory;
}

void ScratchPages::reset() {
  if (!extra_.empty()) {
    extra_.clear();
    block_ = Pages();
    block_ = Pages(wanted_ + wanted_ / 4);
  }
  used_ = wanted_ = 0;
}

KvMemory::KvMemory(const std::vector<KvShape>& slots, KvType type, std::int64_t block_size, std::int64_t blocks) {
  require(block_size > 0 && block_size % kPagePositions == 0, "block_size must be a multiple of 16");
  require(blocks >= 1, "the KV cache needs at least one block");
  cache_.block_size = block_size;
  cache_.blocks = blocks;
  for (const KvShape& shape : slots) {
    require(shape.kv_heads >= 1 && shape.key_dim >= 1 && shape.value_dim >= 1, "a KV slot has an empty dimension");
    require(shape.key_dim <= kMostDims && shape.value_dim <= kMostDims, "a KV slot has heads of more than 2^20 dims");
    KvSlot slot{nullptr, nullptr, type, shape.kv_heads, shape.key_dim, shape.value_dim};
    pages_.emplace_back(product(key_bytes(slot), static_cast<std::size_t>(blocks)));
    slot.keys = pages_.back().data();
    pages_.emplace_back(product(value_bytes(slot), static_cast<std::size_t>(blocks)));
    slot.values = pages_.back().data();
    cache_.slots.push_back(slot);
  }
}

std::size_t KvMemory::block_bytes(const KvSlot& slot, PageLayout page) const {
  const auto pages = static_cast<std::size_t>(cache_.block_size / kPagePositions);
  return product(product(static_cast<std::size_t>(slot.kv_heads), pages), static_cast<std::size_t>(page.bytes()));
}

std::size_t KvMemory::key_bytes(const KvSlot& slot) const {
  return block_bytes(slot, key_layout(slot.type, slot.key_dim));
}

std::size_t KvMemory::value_bytes(const KvSlot& slot) const {
  return block_bytes(slot, value_layout(slot.type, slot.value_dim));
}

void KvMemory::check_block(std::int64_t block) const {
  if (block < 0 || block >= cache_.blocks) {
    fail("block " + std::to_string(block) + " is not one of the cache's " + std::to_string(cache_.blocks));
  }
}

void KvMemory::copy_block(std::int64_t source, std::int64_t target) {
  check_block(source);
  check_block(target);
  if (source == target) return;
  for (const KvSlot& slot : cache_.slots) {
    const std::size_t keys = key_bytes(slot), values = value_bytes(slot);
    const auto from = static_cast<std::size_t>(source), to = static_cast<std::size_t>(target);
    std::memcpy(slot.keys + to * keys, slot.keys + from * keys, keys);
    std::memcpy(slot.values + to * values, slot.values + from * values, values);
  }
}

void KvMemory::move_positions(const std::int32_t* blocks, std::int64_t count, const std::int32_t* sources,
                              const std::int32_t* targets, std::int64_t moves) {
  for (std::int64_t i = 0; i < count; ++i) check_block(blocks[i]);
  for (std::int64_t i = 0; i < moves; ++i) {
    for (const std::int32_t position : {sources[i], targets[i]}) {
      require(position >= 0 && position / cache_.block_size < count, "a position is in none of the blocks");
    }
  }
  const std::int64_t pages = cache_.block_size / kPagePositions;
  for (const KvSlot& slot : cache_.slots) {
    const PageLayout key_page = key_layout(slot.type, slot.key_dim),
                     value_page = value_layout(slot.type, slot.value_dim);
    const auto page_of = [&](std::int64_t position, std::int64_t head) {
      const std::int64_t block = blocks[position / cache_.block_size];
      return (block * slot.kv_heads + head) * pages + position % cache_.block_size / kPagePositions;
    };
    for (std::int64_t i = 0; i < moves; ++i) {
      const std::int64_t from = sources[i] % kPagePositions, to = targets[i] % kPagePositions;
      for (std::int64_t head = 0; head < slot.kv_heads; ++head) {
        const std::int64_t source = page_of(sources[i], head), target = page_of(targets[i], head);
        copy_position(slot.type, true, key_page, slot.keys + source * key_page.bytes(), from,
                      slot.keys + target * key_page.bytes(), to);
        copy_position(slot.type, false, value_page, slot.values + source * value_page.bytes(), from,
                      slot.values + target * value_page.bytes(), to);
      }
    }
  }
}

void KvMemory::poison_block(std::int64_t block) {
  check_block(block);
  for (const KvSlot& slot : cache_.slots) {  // all bits set is a NaN of each of the types, or of its scales
    const std::size_t keys = key_bytes(slot), values = value_bytes(slot), index = static_cast<std::size_t>(block);
    std::memset(slot.keys + index * keys, 0xff, keys);
    std::memset(slot.values + index * values, 0xff, values);
  }
}

}  // namespace llmc
