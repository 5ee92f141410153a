// Products of bfloat16 pairs in AMX tiles: 16 x 16 sums of 32 products each an instruction.
#pragma once

#include "math_bf16.h"

namespace dustin::DUSTIN_ISA {

// The compiler does not know what tile instructions read: what was stored before must be in memory.
inline void settle(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

class TileMath : public PairOperands {
 public:
  static constexpr int kBlock = 128;  // keys: long enough that loading and storing sums is cheap
  static constexpr int kMostKeys = kBlock + 32;
  static constexpr int kRowPad = 16;

  TileMath(Arena& arena, int mp, int dim)
      : PairOperands(arena, kMostKeys, mp, dim),
        pt_(arena.take<float>(static_cast<size_t>(mp) * (kMostKeys / 2))) {
    // All eight tiles 16 rows of 64 bytes.
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_a_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    settle(&config);
    _tile_loadconfig(&config);
  }
  // Leaves the thread's tiles as others, oneDNN for one, expect them: unused.
  ~TileMath() { _tile_release(); }

  static size_t room(int mp, int dim) {
    return PairOperands::room(kMostKeys, mp, dim) +
           Arena::room<float>(static_cast<size_t>(mp) * (kMostKeys / 2));
  }

  // Read `keys` keys where they lie, `stride` elements apart, instead of staging them. False where
  // tiles would not fit them.
  bool view_keys(const void* first, int64_t stride, int keys) {
    if (dim_ % kKeyPad || keys % 16) return false;
    keys_ = static_cast<const Bfloat16*>(first);
    stride_ = stride;
    return true;
  }

  // s[keys, mp] = k q^T, 16 keys by up to 64 query rows at a time.
  void logits(int keys, float* s, Ahead& ahead) {
    const Bfloat16* const k = keys_ ? keys_ : k_;
    const int64_t stride = keys_ ? stride_ : kp_;
    keys_ = nullptr;
    settle(k);
    for (int j = 0; j < keys; j += 16) {
      for (int r = 0; r < mp_; r += 64) {
        const int tiles = std::min(4, (mp_ - r) / 16);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < kp_ / 2; c += 16) {
          ahead.step((keys + 15) / 16 * ((mp_ + 63) / 64) * (kp_ / 32));
          const float* q = q_ + static_cast<int64_t>(c) * mp_ + r;
          _tile_loadd(4, k + j * stride + 2 * c, stride * sizeof(Bfloat16));
          _tile_loadd(5, q, mp_ * sizeof(float));
          _tile_dpbf16ps(0, 4, 5);
          if (tiles > 1) {
            _tile_loadd(6, q + 16, mp_ * sizeof(float));
            _tile_dpbf16ps(1, 4, 6);
          }
          if (tiles > 2) {
            _tile_loadd(7, q + 32, mp_ * sizeof(float));
            _tile_dpbf16ps(2, 4, 7);
          }
          if (tiles > 3) {
            _tile_loadd(5, q + 48, mp_ * sizeof(float));
            _tile_dpbf16ps(3, 4, 5);
          }
        }
        float* d = s + j * mp_ + r;
        _tile_stored(0, d, mp_ * sizeof(float));
        if (tiles > 1) _tile_stored(1, d + 16, mp_ * sizeof(float));
        if (tiles > 2) _tile_stored(2, d + 32, mp_ * sizeof(float));
        if (tiles > 3) _tile_stored(3, d + 48, mp_ * sizeof(float));
      }
    }
  }

  template <class Value>
  void add_values(int keys, int rows, const Value& value, const float* p, const float* alpha,
                  float* o, Ahead& ahead) const {
    const int padded = round_up(keys, 32);
    stage_values(keys, padded, value);
    stage_weights(keys, padded, p);
    for (int j = 0; j < padded / 2; j += 16)
      for (int r = 0; r < mp_; r += 16)
        transpose(p_ + j * mp_ + r, mp_, pt_ + r * (kMostKeys / 2) + j, kMostKeys / 2);
    for (int r = 0; r < rows; r++) {
      if (alpha[r] == 1.f) continue;
      const Vec a = splat(alpha[r]);
      float* row = o + r * dp_;
      for (int c = 0; c < dp_; c += kLanes) store(row + c, load(row + c) * a);
    }
    settle(o);
    for (int c = 0; c < dp_; c += 32) {
      for (int r = 0; r < mp_;) {
        // Up to three by two tiles of sums: what is loaded of the values serves three products.
        const int tiles = std::min(3, (mp_ - r) / 16);
        const bool wide = c + 16 < dp_;
        if (tiles == 3)
          wide ? add_tiles<3, true>(padded, r, c, o, ahead)
               : add_tiles<3, false>(padded, r, c, o, ahead);
        else if (tiles == 2)
          wide ? add_tiles<2, true>(padded, r, c, o, ahead)
               : add_tiles<2, false>(padded, r, c, o, ahead);
        else
          wide ? add_tiles<1, true>(padded, r, c, o, ahead)
               : add_tiles<1, false>(padded, r, c, o, ahead);
        r += 16 * tiles;
      }
    }
  }

 private:
  template <int Rows, bool Wide>
  void add_tiles(int padded, int r, int c, float* o, Ahead& ahead) const {
    float* d = o + r * dp_ + c;
    const int64_t o_stride = dp_ * sizeof(float), p_stride = kMostKeys / 2 * sizeof(float);
    _tile_loadd(0, d, o_stride);
    if constexpr (Wide) _tile_loadd(1, d + 16, o_stride);
    if constexpr (Rows > 1) _tile_loadd(2, d + 16 * dp_, o_stride);
    if constexpr (Rows > 1 && Wide) _tile_loadd(3, d + 16 * dp_ + 16, o_stride);
    if constexpr (Rows > 2) _tile_loadd(4, d + 32 * dp_, o_stride);
    if constexpr (Rows > 2 && Wide) _tile_loadd(5, d + 32 * dp_ + 16, o_stride);
    for (int j = 0; j < padded / 2; j += 16) {
      ahead.step((padded / 32) * ((dp_ + 31) / 32) * ((mp_ + 47) / 48));
      const float* p = pt_ + r * (kMostKeys / 2) + j;
      const float* v = v_ + static_cast<int64_t>(j) * dp_ + c;
      _tile_loadd(6, v, o_stride);
      _tile_loadd(7, p, p_stride);
      _tile_dpbf16ps(0, 7, 6);
      if constexpr (Rows > 1) {
        _tile_loadd(7, p + 16 * (kMostKeys / 2), p_stride);
        _tile_dpbf16ps(2, 7, 6);
      }
      if constexpr (Rows > 2) {
        _tile_loadd(7, p + 32 * (kMostKeys / 2), p_stride);
        _tile_dpbf16ps(4, 7, 6);
      }
      if constexpr (Wide) {
        _tile_loadd(6, v + 16, o_stride);
        if constexpr (Rows > 2) _tile_dpbf16ps(5, 7, 6);
        if constexpr (Rows > 1) {
          _tile_loadd(7, p + 16 * (kMostKeys / 2), p_stride);
          _tile_dpbf16ps(3, 7, 6);
        }
        if constexpr (Rows > 1) _tile_loadd(7, p, p_stride);
        _tile_dpbf16ps(1, 7, 6);
      }
    }
    _tile_stored(0, d, o_stride);
    if constexpr (Wide) _tile_stored(1, d + 16, o_stride);
    if constexpr (Rows > 1) _tile_stored(2, d + 16 * dp_, o_stride);
    if constexpr (Rows > 1 && Wide) _tile_stored(3, d + 16 * dp_ + 16, o_stride);
    if constexpr (Rows > 2) _tile_stored(4, d + 32 * dp_, o_stride);
    if constexpr (Rows > 2 && Wide) _tile_stored(5, d + 32 * dp_ + 16, o_stride);
  }

  const Bfloat16* keys_ = nullptr;  // those to read in place, if any
  int64_t stride_ = 0;
  float* const pt_;  // weight pairs, a row a query row: [mp, kMostKeys / 2]
};

}  // namespace dustin::DUSTIN_ISA
