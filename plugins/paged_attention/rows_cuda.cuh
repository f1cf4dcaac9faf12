// Which rows of a batch see which keys, and how the work is cut.
//
// A row here is one query head of one new token; those of a kv head's group stand side by side: row r of a sequence is
// new token r / group and head r % group of the group. Keys are walked in tiles, and tiles belong to units, whose
// bounds depend on nothing but positions. Each unit gets its own softmax; units are added up in ascending order. So
// the sums of a row are the same ones whoever computes them: attention_prefill (a block walks all units of its rows)
// or attention_decode and attention_combine (a block for each unit).
#pragma once

constexpr int SHORT_UNIT = 256, SHORT_UNITS = 16, LONG_UNIT = 1024;
constexpr int LONG_FROM = SHORT_UNIT * SHORT_UNITS;

DEV int unit_of(int position) {
  return position < LONG_FROM ? position / SHORT_UNIT : SHORT_UNITS + (position - LONG_FROM) / LONG_UNIT;
}

DEV int unit_start(int unit) {
  return unit < SHORT_UNITS ? unit * SHORT_UNIT : LONG_FROM + (unit - SHORT_UNITS) * LONG_UNIT;
}

struct Sequence {
  int first, rows, past;  // its first new token in the batch, how many there are, and tokens before them
  const int32_t* table;

  DEV int length() const { return past + rows; }
};

DEV Sequence sequence_of(const AttentionParams& p, int s) {
  const int32_t* bounds = static_cast<const int32_t*>(p.cu_seqlens);
  int first = bounds[s];
  return {first, bounds[s + 1] - first, static_cast<const int32_t*>(p.num_computed)[s],
          static_cast<const int32_t*>(p.block_tables) + static_cast<int64_t>(s) * p.max_blocks};
}

// The position from which on a query sees keys.
DEV int first_visible(const AttentionParams& p, int position) {
  int first = 0;
  if (p.window > 0) first = max(first, position - p.window + 1);
  if (p.chunk > 0) first = max(first, position / p.chunk * p.chunk);
  return first;
}

// Few rows are the business of attention_decode.
DEV bool is_short(const AttentionParams& p, const Sequence& sequence) {
  return sequence.rows * p.group <= p.short_rows;
}

// Units that a short sequence needs, and the first of them.
DEV int units_of(const AttentionParams& p, const Sequence& sequence, int& first) {
  first = unit_of(first_visible(p, sequence.past));
  return sequence.rows > 0 && is_short(p, sequence) ? unit_of(sequence.length() - 1) - first + 1 : 0;
}

// Item `work` of all items of all sequences, of which sequence s has count(s): finds whose it is, and its number
// there. For whole warps.
template <class Count>
DEV bool find_work(const AttentionParams& p, int work, Count count, int& sequence, int& item) {
  int lane = threadIdx.x % 32;
  for (int base = 0; base < p.sequences; base += 32) {
    int own = base + lane < p.sequences ? count(base + lane) : 0, upto = own;
    UNROLL for (int offset = 1; offset < 32; offset *= 2) {
      int before = __shfl_up_sync(FULL_WARP, upto, offset);
      if (lane >= offset) upto += before;
    }
    uint32_t behind = __ballot_sync(FULL_WARP, work < upto);
    if (behind != 0) {
      int which = __popc((behind & (0u - behind)) - 1);  // the lowest bit
      sequence = base + which;
      item = work - __shfl_sync(FULL_WARP, upto - own, which);
      return true;
    }
    work -= __shfl_sync(FULL_WARP, upto, 31);
  }
  return false;
}

// The sequence of a new token, if it is of any.
DEV bool find_sequence(const AttentionParams& p, int token, int& sequence) {
  int row;
  return find_work(p, token, [&](int s) { return sequence_of(p, s).rows; }, sequence, row);
}

// A number of a small input: sinks, slopes, centers and scales come in any float type.
DEV float side(const void* numbers, int kind, int64_t i) {
  if (kind == 1) return to_f(static_cast<const BF16*>(numbers)[i]);
  if (kind == 2) return to_f(static_cast<const F16*>(numbers)[i]);
  return static_cast<const float*>(numbers)[i];
}

// What a lane knows of its two rows of a warp's 16: lane / 4 and lane / 4 + 8.
struct LaneRows {
  int token[2];  // in the batch; -1: there is no such row
  int head[2];
  int low[2], high[2];  // sees low .. high; under a tree high is the last cached position, and bits say the rest
  int position[2];
  float slope[2], shift[2];
  int low_most, high_least;  // what all 16 see
};

DEV LaneRows rows_of_lane(const AttentionParams& p, const Sequence& sequence, int kv_head, int first_row) {
  LaneRows rows;
  int low = 0, high = 0x7fffffff;
  UNROLL for (int half = 0; half < 2; ++half) {
    int r = first_row + static_cast<int>(threadIdx.x % 32) / 4 + 8 * half, token = r / p.group;
    bool exists = token < sequence.rows;
    rows.token[half] = exists ? sequence.first + token : -1;
    rows.head[half] = kv_head * p.group + r % p.group;
    rows.position[half] = sequence.past + token;
    if (exists && p.tree_mask)
      rows.position[half] = static_cast<const int32_t*>(p.position_ids)[sequence.first + token];
    rows.low[half] = exists ? first_visible(p, rows.position[half]) : 0;
    rows.high[half] = !exists ? 0x7fffffff : p.tree_mask ? sequence.past - 1 : sequence.past + token;
    rows.slope[half] = exists && p.slopes ? side(p.slopes, p.slopes_kind, rows.head[half]) : 0.0f;
    rows.shift[half] = 0.0f;
    if (exists && p.shifts) {
      rows.shift[half] =
          static_cast<const float*>(p.shifts)[static_cast<int64_t>(rows.token[half]) * p.heads + rows.head[half]];
    }
    low = max(low, rows.low[half]);
    high = min(high, rows.high[half]);
  }
  UNROLL for (int offset = 4; offset < 32; offset *= 2) {
    low = max(low, __shfl_xor_sync(FULL_WARP, low, offset));
    high = min(high, __shfl_xor_sync(FULL_WARP, high, offset));
  }
  rows.low_most = low;
  rows.high_least = high;
  return rows;
}

// The position of a key: only new tokens of a tree stand elsewhere than in the cache.
DEV int position_of_key(const AttentionParams& p, const Sequence& sequence, int j) {
  int behind = j - sequence.past;
  if (!p.tree_mask || behind < 0 || behind >= sequence.rows) return j;
  return static_cast<const int32_t*>(p.position_ids)[sequence.first + behind];
}

DEV bool is_visible(const AttentionParams& p, const Sequence& sequence, const LaneRows& rows, int half, int j) {
  int behind = j - sequence.past;
  if (!p.tree_mask || behind < 0) return j >= rows.low[half] && j <= rows.high[half];
  if (behind >= sequence.rows || rows.token[half] < 0) return false;
  const uint32_t* words =
      static_cast<const uint32_t*>(p.tree_mask) + static_cast<int64_t>(rows.token[half]) * 2 * p.tree_words;
  return (words[behind / 32] >> behind % 32 & 1) && position_of_key(p, sequence, j) >= rows.low[half];
}
