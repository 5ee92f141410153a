// select_tokens: radix selection, a few passes over a row whatever the budget.
#include <algorithm>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "pool.h"

namespace dustin {
namespace {

// Floats as integers of the same order; NaN is the largest, -0 equals 0.
inline uint32_t order_of(float score) {
  uint32_t bits;
  score += 0.f;  // -0 becomes 0
  std::memcpy(&bits, &score, sizeof bits);
  if (score != score) return 0xffffffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Positions of one row: the middle between sink and window, and which of it is chosen.
class Row {
 public:
  Row(int length, int sink, int window)
      : first_(sink), last_(length - window), chosen_(length, 0), orders_(length) {
    std::fill(chosen_.begin(), chosen_.begin() + sink, 1);
    std::fill(chosen_.end() - window, chosen_.end(), 1);
  }

  // Choose the `count` best that are not chosen yet; of equal ones the earliest.
  void take_top(const float* scores, int count) {
    if (count <= 0) return;
    candidates_.clear();
    int histogram[kBins] = {};
    for (int j = first_; j < last_; j++) {
      if (chosen_[j]) continue;
      orders_[j] = order_of(scores[j]);
      histogram[orders_[j] >> kShift]++;
    }
    // The bin in which the last one to choose lies; above it all are chosen.
    int bin = kBins - 1, wanted = count;
    while (histogram[bin] < wanted) wanted -= histogram[bin--];
    const uint32_t low = static_cast<uint32_t>(bin) << kShift, high = low | ((1u << kShift) - 1);
    for (int j = first_; j < last_; j++) {
      if (chosen_[j]) continue;
      if (orders_[j] > high)
        chosen_[j] = 1;
      else if (orders_[j] >= low)
        candidates_.push_back(j);
    }
    // Of the bin's few, the first `wanted` by (score, position): one threshold decides.
    if (static_cast<int>(candidates_.size()) > wanted)
      std::nth_element(
          candidates_.begin(), candidates_.begin() + wanted, candidates_.end(),
          [&](int a, int b) { return orders_[a] != orders_[b] ? orders_[a] > orders_[b] : a < b; });
    for (int i = 0; i < wanted; i++) chosen_[candidates_[i]] = 1;
  }

  void write(int32_t* indices) const {
    for (size_t j = 0; j < chosen_.size(); j++)
      if (chosen_[j]) *indices++ = static_cast<int32_t>(j);
  }

 private:
  static constexpr int kBins = 1 << 12, kShift = 32 - 12;

  const int first_, last_;
  std::vector<char> chosen_;
  std::vector<uint32_t> orders_;
  std::vector<int> candidates_;
};

void check_lengths(const DustinSelectTokensParams& p) {
  for (int b = 0; b < p.batch; b++) {
    const int length = p.lengths[b];
    if (length < 0) refuse("lengths[", b, "] is ", length);
    if (length <= p.budget) continue;  // no score is read
    if (p.target_scores && length > p.target_width)
      refuse("lengths[", b, "] is ", length, ", target_scores has ", p.target_width);
    if (p.draft_scores && length > p.draft_width)
      refuse("lengths[", b, "] is ", length, ", draft_scores has ", p.draft_width);
  }
}

void select_row(const DustinSelectTokensParams& p, int b) {
  const int length = p.lengths[b], count = std::min(length, p.budget);
  int32_t* const indices = p.indices + b * p.indices_stride;
  p.counts[b] = count;
  if (length <= p.budget) {
    for (int j = 0; j < length; j++) indices[j] = j;
    std::fill(indices + length, indices + p.budget, -1);
    return;
  }
  const float* target = p.target_scores ? p.target_scores + b * p.target_stride : nullptr;
  const float* draft = p.draft_scores ? p.draft_scores + b * p.draft_stride : nullptr;
  if (!target) std::swap(target, draft);
  Row row(length, p.sink, target ? p.window : p.budget - p.sink);
  if (target) {
    const int free = p.budget - p.sink - p.window;
    const int ahead = draft ? std::min(p.lookahead, free) : 0;
    if (draft) row.take_top(draft, ahead);
    row.take_top(target, free - ahead);
  }
  row.write(indices);
}

}  // namespace
}  // namespace dustin

extern "C" int32_t dustin_cpu_select_tokens(const DustinSelectTokensParams* params,
                                            int32_t threads) {
  using namespace dustin;
  return guarded([&] {
    refuse_null(params, "params");
    refuse_below(threads, 1, "threads");
    if (!check_arguments(*params)) return;
    check_lengths(*params);
    parallel_for(params->batch, threads, [&](int b) { select_row(*params, b); });
  });
}
