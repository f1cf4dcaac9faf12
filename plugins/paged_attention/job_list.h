// How an attention step is cut into jobs. It depends on the batch and the threads; no result does.
#pragma once
#include <new>

#include "job.h"

namespace llmc::LLMC_ISA {

constexpr std::int64_t kFewestJobRows = 24;  // where a step has enough rows
constexpr std::int64_t kParts = 8;           // no job is longer than that part of a thread's share

class JobList {
 public:
  JobList(const Step& step, std::int64_t most_rows, int threads) : step_(step) {
    const Batch& batch = step.context.batch;
    const std::int64_t rows = batch.tokens * step.heads;
    job_rows_ = std::clamp(rows / (4 * threads), kFewestJobRows, most_rows);
    for (std::int64_t s = 0; s < batch.sequences; ++s) count(sequence_of(batch, s));
    limit_ = threads == 1 ? cost_ + 1 : cost_ / (kParts * threads) + 1;
    jobs_ = step.context.scratch.array<Job>(sets_ + kParts * threads);
    for (std::int64_t s = 0; s < batch.sequences; ++s) add(sequence_of(batch, s), static_cast<std::int32_t>(s));
  }

  std::int64_t size() const { return size_; }
  const Job* jobs() const { return jobs_; }
  std::int64_t cost() const { return cost_; }
  std::int64_t longest() const { return longest_; }  // tokens of a job

 private:
  struct Tokens {
    std::int64_t first, count;
    Range range;        // what any of them sees
    std::int64_t cost;  // positions x rows
  };

  Tokens tokens_at(const Sequence& sequence, bool chain, std::int64_t first, std::int64_t count) const {
    Range range{visible(step_, sequence, first).begin, visible(step_, sequence, first + count - 1).end};
    for (std::int64_t r = first; !chain && r < first + count; ++r) {  // in a chain both bounds grow from token to token
      const Range own = visible(step_, sequence, r);
      range = {std::min(range.begin, own.begin), std::max(range.end, own.end)};
    }
    Tokens tokens{first, count, range, 0};
    tokens.cost = (tokens.range.end - tokens.range.begin) * count * step_.group;
    return tokens;
  }

  // Tokens with the longest past come first, so that the last jobs of a step are short.
  template <class F>
  void for_each_tokens(const Sequence& sequence, bool chain, F&& f) const {
    if (sequence.rows == 0) return;
    const std::int64_t step = std::min(std::max<std::int64_t>(1, job_rows_ / step_.group), sequence.rows);
    for (std::int64_t end = sequence.rows; end > 0; end -= std::min(end, step)) {
      const std::int64_t first = std::max<std::int64_t>(0, end - step);
      f(tokens_at(sequence, chain, first, end - first));
    }
  }

  static std::int64_t first_tile(const Tokens& tokens) { return tokens.range.begin / kTile; }
  static std::int64_t last_tile(const Tokens& tokens) { return (tokens.range.end + kTile - 1) / kTile; }

  void count(const Sequence& sequence) {
    for_each_tokens(sequence, is_chain(step_.context.batch, sequence), [&](const Tokens& tokens) {
      cost_ += tokens.cost * step_.slot.kv_heads;
      sets_ += step_.slot.kv_heads;
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
    const std::int64_t padded = (rows + kLanes - 1) / kLanes * kLanes, size = padded * (2 + step_.width);
    float* memory = scratch.array<float>(tiles * size);
    for (std::int64_t t = 0; t < tiles; ++t, memory += size) {
      split->seen[t] = {memory, memory + padded, memory + 2 * padded};
    }
    return split;
  }

  const Step& step_;
  std::int64_t job_rows_ = 0, cost_ = 0, limit_ = 0, sets_ = 0, longest_ = 0, size_ = 0;
  Job* jobs_ = nullptr;
};

}  // namespace llmc::LLMC_ISA
