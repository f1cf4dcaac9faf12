// Copies what one slot of the cache holds of positions of a sequence, one pair after the other. Grid: kv heads.
//
// A pair's target may be the source of a later one: every thread has bytes of its own, and takes the pairs in order.
#pragma once

DEV int64_t place_of(const MoveParams& p, int position) {
  int block = static_cast<const int32_t*>(p.blocks)[position / p.block_size];
  return (static_cast<int64_t>(block) * p.kv_heads + blockIdx.x) * p.block_size + position % p.block_size;
}

DEV void attention_move(const MoveParams& p) {
  int pieces = (p.key_bytes + p.value_bytes) / 16, extra = p.key_scales ? 2 : 0;
  for (int i = threadIdx.x; i < pieces + extra; i += blockDim.x) {
    for (int n = 0; n < p.count; ++n) {
      int64_t from = place_of(p, static_cast<const int32_t*>(p.sources)[n]);
      int64_t to = place_of(p, static_cast<const int32_t*>(p.targets)[n]);
      if (i >= pieces) {
        float* scales = static_cast<float*>(i == pieces ? p.key_scales : p.value_scales);
        scales[to] = scales[from];
        continue;
      }
      bool key = i * 16 < p.key_bytes;
      unsigned char* pool = static_cast<unsigned char*>(key ? p.keys : p.values) + (i * 16 - (key ? 0 : p.key_bytes));
      int64_t bytes = key ? p.key_bytes : p.value_bytes;
      st_vec<uint4>(pool + to * bytes, ld_vec<uint4>(pool + from * bytes));
    }
  }
}
