// The ops as plain loops in double precision: what the kernels are compared with.
#ifndef DUSTIN_TESTS_REFERENCE_H_
#define DUSTIN_TESTS_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "inputs.h"

inline double dot(const std::vector<double>& query, const double* key) {
  double sum = 0;
  for (size_t d = 0; d < query.size(); ++d) sum += query[d] * key[d];
  return sum;
}

// Turns logits into weights that sum to one; returns the log of their sum before.
inline double softmax(std::vector<double>& logits) {
  double most = -INFINITY, sum = 0;
  for (const double logit : logits) most = std::max(most, logit);
  for (double& logit : logits) sum += logit = std::exp(logit - most);
  for (double& weight : logits) weight /= sum;
  return most + std::log(sum);
}

struct Attention {
  std::vector<double> out;  // [B, Hq, w, D]
  std::vector<double> lse;  // [B, Hq, w]
};

// Every row reads the history tokens in `history` and, causally, its w new ones.
inline Attention attend(const Shape& shape, const Cache& cache, const Rows& q,
                        const std::vector<std::vector<int32_t>>& history, float scale) {
  const int dim = shape.head_dim;
  Attention result;
  for (int b = 0; b < shape.batch(); ++b)
    for (int head = 0; head < shape.heads(); ++head) {
      const int length = cache.length(b), kv_head = head / shape.group;
      const std::vector<double> keys = cache.keys(b, kv_head, length + shape.rows);
      const std::vector<double> values = cache.values(b, kv_head, length + shape.rows);
      std::vector<int32_t> tokens = history[b];
      for (int row = 0; row < shape.rows; ++row) {
        tokens.push_back(length + row);
        const std::vector<double> query = q.values(b, row, head);
        std::vector<double> weights, out(dim);
        for (const int t : tokens) weights.push_back(dot(query, &keys[t * dim]) * scale);
        result.lse.push_back(softmax(weights));
        for (size_t i = 0; i < tokens.size(); ++i)
          for (int d = 0; d < dim; ++d) out[d] += weights[i] * values[tokens[i] * dim + d];
        result.out.insert(result.out.end(), out.begin(), out.end());
      }
    }
  return result;
}

// What one row's queries add to the scores of its history.
inline std::vector<double> srh_scores(const Shape& shape, const Cache& cache, const Rows& queries,
                                      const std::vector<int32_t>& kv_heads, int b, float scale) {
  const int length = cache.length(b);
  std::vector<double> scores(length);
  for (size_t head = 0; head < kv_heads.size(); ++head) {
    const std::vector<double> keys = cache.keys(b, kv_heads[head], length);
    for (int row = 0; row < shape.rows; ++row) {
      const std::vector<double> query = queries.values(b, row, head);
      std::vector<double> weights;
      for (int t = 0; t < length; ++t)
        weights.push_back(dot(query, &keys[t * shape.head_dim]) * scale);
      softmax(weights);
      for (int t = 0; t < length; ++t) scores[t] += weights[t];
    }
  }
  return scores;
}

struct Choice {
  int budget, lookahead, sink, window;
};

// The tokens that select_tokens chooses of one row, ascending.
inline std::vector<int32_t> select(std::optional<std::vector<float>> target,
                                   std::optional<std::vector<float>> draft, int length,
                                   Choice choice) {
  auto [budget, lookahead, sink, window] = choice;
  std::vector<int32_t> tokens;
  if (length <= budget) {
    for (int t = 0; t < length; ++t) tokens.push_back(t);
    return tokens;
  }
  if (!target) std::swap(target, draft);
  if (!draft) lookahead = 0;
  if (!target) window = budget - sink;
  std::vector<bool> chosen(length);
  for (int t = 0; t < length; ++t) chosen[t] = t < sink || t >= length - window;
  const auto take = [&](const std::vector<float>& scores, int count) {
    std::vector<int32_t> left;
    for (int t = 0; t < length; ++t)
      if (!chosen[t]) left.push_back(t);
    std::stable_sort(left.begin(), left.end(), [&](int a, int b) {
      if (std::isnan(scores[a]) || std::isnan(scores[b]))
        return std::isnan(scores[a]) && !std::isnan(scores[b]);
      return scores[a] > scores[b];
    });
    for (int i = 0; i < count; ++i) chosen[left[i]] = true;
  };
  const int open = budget - sink - window, ahead = std::min(lookahead, open);
  if (draft) take(*draft, ahead);
  if (target) take(*target, open - ahead);
  for (int t = 0; t < length; ++t)
    if (chosen[t]) tokens.push_back(t);
  return tokens;
}

#endif  // DUSTIN_TESTS_REFERENCE_H_
