// Products of bfloat16 pairs, summed in fp32: with the AVX512_BF16 instructions, or in AMX tiles.
//
// Both take operands as 32-bit words that hold two neighbours along the dimension summed over: head
// elements (2c, 2c + 1) for the logits, keys (2j, 2j + 1) for the values.
#pragma once

#include "math_plain.h"

namespace dustin::DUSTIN_ISA {

// Queries, keys, values and weights as pairs.
class PairOperands {
 public:
  using Element = Bfloat16;

  PairOperands(Arena& arena, int block, int mp, int dim)
      : mp_(mp),
        dim_(dim),
        dp_(round_up(dim, kLanes)),
        kp_(round_up(dim, kKeyPad)),
        q_(arena.take<float>(static_cast<size_t>(kp_ / 2) * mp)),
        k_(arena.take<Bfloat16>(static_cast<size_t>(block) * kp_)),
        v_(arena.take<float>(static_cast<size_t>(block / 2) * dp_)),
        p_(arena.take<float>(static_cast<size_t>(block / 2) * mp)) {}

  static size_t room(int block, int mp, int dim) {
    const size_t dp = round_up(dim, kLanes), kp = round_up(dim, kKeyPad);
    return Arena::room<float>(kp / 2 * mp) + Arena::room<Bfloat16>(block * kp) +
           Arena::room<float>(block / 2 * dp) +
           Arena::room<float>(static_cast<size_t>(block) / 2 * mp);
  }

  template <class Row>
  void take_queries(int rows, const Row& row) {
    for (int r0 = 0; r0 < mp_; r0 += kLanes) {
      for (int r = 0; r < kLanes; r++) {
        if (r0 + r < rows)
          copy(static_cast<const Bfloat16*>(row(r0 + r)), k_ + r * kp_);
        else
          std::memset(k_ + r * kp_, 0, kp_ * sizeof(Bfloat16));
      }
      // Words are moved, not computed with: a pair travels as one float.
      for (int c = 0; c < kp_ / 2; c += kLanes)
        transpose(reinterpret_cast<const float*>(k_) + c, kp_ / 2,
                  q_ + static_cast<int64_t>(c) * mp_ + r0, mp_);
    }
  }

  void stage_key(int j, const void* row) {
    copy(static_cast<const Bfloat16*>(row), k_ + static_cast<int64_t>(j) * kp_);
  }

 protected:
  static constexpr int kKeyPad = 32;  // elements; an AMX tile row

  // Value pairs v_[keys / 2, dp]; an odd key's partner is zero, as is what rounds up to `padded`.
  template <class Value>
  void stage_values(int keys, int padded, const Value& value) const {
    for (int j = 0; j < padded; j += 2) {
      float* dst = v_ + static_cast<int64_t>(j / 2) * dp_;
      const Bfloat16* even = j < keys ? static_cast<const Bfloat16*>(value(j)) : nullptr;
      const Bfloat16* odd = j + 1 < keys ? static_cast<const Bfloat16*>(value(j + 1)) : nullptr;
      for (int c = 0; c < dp_; c += kLanes) {
        const __m512i low = part(even, c), high = part(odd, c);
        _mm512_storeu_si512(dst + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    }
  }

  // Weights p[j, mp] to pairs p_[keys / 2, mp], zero for keys from `keys` to `padded`.
  void stage_weights(int keys, int padded, const float* p) const {
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int j = 0; j < padded; j += 2)
      for (int r = 0; r < mp_; r += kLanes) {
        const __m512 even = j < keys ? _mm512_loadu_ps(p + j * mp_ + r) : _mm512_setzero_ps();
        const __m512 odd =
            j + 1 < keys ? _mm512_loadu_ps(p + (j + 1) * mp_ + r) : _mm512_setzero_ps();
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_storeu_si512(p_ + j / 2 * mp_ + r, _mm512_permutexvar_epi16(interleave, both));
      }
  }

  const int mp_, dim_, dp_, kp_;
  float* const q_;     // pairs [kp / 2, mp]
  Bfloat16* const k_;  // [block, kp], zeros from dim on
  float* const v_;     // pairs [block / 2, dp]
  float* const p_;     // pairs [block / 2, mp]

 private:
  void copy(const Bfloat16* src, Bfloat16* dst) const {
    int c = 0;
    for (; c + 32 <= dim_; c += 32) _mm512_storeu_si512(dst + c, _mm512_loadu_si512(src + c));
    if (c < kp_) {
      const __mmask32 mask = (1u << (dim_ - c)) - 1;
      _mm512_storeu_si512(dst + c, _mm512_maskz_loadu_epi16(mask, src + c));
    }
  }

  // Elements c ... c + 15 of a row, each in a word of its own.
  __m512i part(const Bfloat16* row, int c) const {
    if (!row) return _mm512_setzero_si512();
    if (c + kLanes <= dim_)
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + c)));
    const __mmask16 mask = static_cast<__mmask16>((1u << (dim_ - c)) - 1);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + c));
  }
};

struct Pairs {
  static Vec madd(Vec a, Vec b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(a.v),
                             (__m512bh)_mm512_castps_si512(b.v))};
  }
};

// AVX512_BF16: two products an instruction and lane.
class PairMath : public PairOperands {
 public:
  static constexpr int kBlock = 64;  // keys
  static constexpr int kMostKeys = kBlock + 16;
  static constexpr int kRowPad = kLanes;

  PairMath(Arena& arena, int mp, int dim) : PairOperands(arena, kMostKeys, mp, dim) {}
  static size_t room(int mp, int dim) { return PairOperands::room(kMostKeys, mp, dim); }

  // These products need the keys staged.
  bool view_keys(const void*, int64_t, int) { return false; }

  void logits(int keys, float* s, Ahead& ahead) const {
    const float* k = reinterpret_cast<const float*>(k_);
    all_dots<Pairs>(q_, mp_, k, kp_ / 2, kp_ / 2, keys, s, ahead);
  }

  template <class Value>
  void add_values(int keys, int rows, const Value& value, const float* p, const float* alpha,
                  float* o, Ahead& ahead) const {
    const int padded = round_up(keys, 2);
    stage_values(keys, padded, value);
    stage_weights(keys, padded, p);
    accumulate_all<Pairs>(rows, p_, mp_, v_, dp_, padded / 2, alpha, o, ahead);
  }
};

}  // namespace dustin::DUSTIN_ISA
