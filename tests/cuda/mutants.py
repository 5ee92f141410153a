"""Broken CUDA kernels: mistakes that such code is prone to. A test must catch every one of them.

`make mutants` builds each under the emulator and runs tests/cuda/test_cuda.cpp on it;
`test_mutants.py` holds the list to the sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    mistake : in words; names it
    file : in plugins/cuda
    find, replace : text of that file, which occurs once, and what stands there instead
    """

    mistake: str
    file: str
    find: str
    replace: str


def _attention(mistake: str, find: str, replace: str) -> Mutant:
    return Mutant(mistake, "attention.cuh", find, replace)


def _score(mistake: str, find: str, replace: str) -> Mutant:
    return Mutant(mistake, "srh_score.cuh", find, replace)


def _select(mistake: str, find: str, replace: str) -> Mutant:
    return Mutant(mistake, "select_tokens.cuh", find, replace)


MUTANTS = (
    # Barriers and copies.
    _attention(
        "no barrier before copying into a ring's stage",
        "__syncthreads();  // the tile is there for all, and nobody reads the one before any more",
        "",
    ),
    _attention(
        "no barrier between finding keys and copying them",
        "  __syncthreads();\n  for (int tile = 0; tile < p.stages - 1; ++tile) {",
        "  for (int tile = 0; tile < p.stages - 1; ++tile) {",
    ),
    _attention("no wait for copies", "    wait_for_copies(p.stages - 2);\n", ""),
    _attention(
        "one group too few waited for",
        "wait_for_copies(p.stages - 2)",
        "wait_for_copies(p.stages - 1)",
    ),
    _attention(
        "copies of the first tiles in one group",
        "    if (tile < tiles) copy_tile(tile, tile);\n    commit_copies();\n  }",
        "    if (tile < tiles) copy_tile(tile, tile);\n  }\n  commit_copies();",
    ),
    _attention(
        "groups only where there is a tile",
        "    commit_copies();\n\n    const int first_key",
        "    if (tile + p.stages - 1 < tiles) commit_copies();\n\n    const int first_key",
    ),
    _attention(
        "a stage overwritten while it is read", "stage == 0 ? p.stages - 1 : stage - 1", "stage"
    ),
    _attention(
        "no barrier before warps hand over",
        "    __syncthreads();  // nobody reads tiles, or what was handed over before, any more\n",
        "",
    ),
    _attention(
        "no barrier after warps handed over",
        "    __syncthreads();\n    if (key_warp < ways) take(result, place);",
        "    if (key_warp < ways) take(result, place);",
    ),
    _attention(
        "a barrier that some threads do not come to",
        "    __syncthreads();\n    if (key_warp < ways) take(result, place);",
        "    if (key_warp < ways) {\n      __syncthreads();\n      take(result, place);\n    }",
    ),
    _attention(
        "a ring of places that is too small",
        "offsets[key % (kMaxStages * Shape::kKeys)]",
        "offsets[key % (2 * Shape::kKeys)]",
    ),
    # Masks, ends, tails.
    _attention(
        "causal mask one key too late",
        "if (j / 2 * 8 + j % 2 > limit)",
        "if (j / 2 * 8 + j % 2 > limit + 1)",
    ),
    _attention(
        "causal mask one key too early",
        "if (j / 2 * 8 + j % 2 > limit)",
        "if (j / 2 * 8 + j % 2 >= limit)",
    ),
    _attention(
        "no mask in tiles that end among the new tokens",
        "if (first_key + 15 > reading.count)",
        "if (first_key > reading.count)",
    ),
    _attention(
        "mask by head instead of row",
        "reading.count + row / p.group - first_key",
        "reading.count + row % p.group - first_key",
    ),
    _attention(
        "the last key left out", "return first + key < last ?", "return first + key < last - 1 ?"
    ),
    _attention(
        "keys read past the end",
        "return first + key < last ? reading.token(first + key) : -1;",
        "return first + key < reading.keys + 1 ? reading.token(first + key) : -1;",
    ),
    _attention(
        "the last tile left out",
        "(last - first + Shape::kKeys - 1) / Shape::kKeys",
        "(last - first) / Shape::kKeys",
    ),
    _attention("rows past the last one written", "      if (row >= all_rows) continue;\n", ""),
    _attention(
        "a tile of rows too few",
        "(all_rows - first_row + 15) / 16);",
        "(all_rows - first_row) / 16);",
    ),
    _attention(
        "copies that are not valid not zeroed",
        "const bool valid = offset >= 0;",
        "const bool valid = true;",
    ),
    # Fragments and lanes.
    _attention(
        "halves of a key's fragment swapped",
        "q[2], q[3], key[0], key[1]",
        "q[2], q[3], key[1], key[0]",
    ),
    _attention(
        "rows of a key's matrices by the wrong lanes",
        "(lane % 8 + lane / 16 * 8)",
        "(lane % 8 + lane / 8 % 2 * 8)",
    ),
    _attention("values not transposed", "load_matrices_transposed(value", "load_matrices(value"),
    _attention(
        "columns of values by the wrong lanes",
        "v + lane % 16 * Shape::kPitch + lane / 16 * 8",
        "v + lane % 16 * Shape::kPitch + lane / 8 % 2 * 8",
    ),
    _attention(
        "weights packed in the wrong order",
        "packed[i][1] = pack<T>(weight[i][0][2], weight[i][0][3]);",
        "packed[i][1] = pack<T>(weight[i][1][0], weight[i][1][1]);",
    ),
    _attention(
        "queries of the wrong half",
        "query[tile][step][half + 2] = load_word(q + step * 16 + 2 * t + 8)",
        "query[tile][step][half + 2] = load_word(q + step * 16 + 2 * t)",
    ),
    _attention(
        "keys in the values' place",
        "copy_async(to + Shape::kTileElements + key * Shape::kPitch + column, values",
        "copy_async(to + Shape::kTileElements + key * Shape::kPitch + column, keys",
    ),
    _attention("rows that overlap in shared memory", "kPitch = kDim + 8;", "kPitch = kDim - 8;"),
    # Heads.
    _attention(
        "rows and heads of queries swapped",
        "row_of(p.q, b, row / p.group, kv_head * p.group + row % p.group)",
        "row_of(p.q, b, row % p.group % p.rows, kv_head * p.group + row / p.group % p.group)",
    ),
    _attention(
        "heads counted by KV heads",
        "const int query_row = row / p.group, head = kv_head * p.group + row % p.group;\n      if (whole)",
        "const int query_row = row / p.group, head = row % p.group * p.cache.num_kv_heads + kv_head;\n      if (whole)",
    ),
    # Softmax.
    _attention(
        "maximum not shared by the lanes of a row",
        "          most = fmaxf(most, shuffle_xor(most, 2));\n",
        "",
    ),
    _attention("sum not shared by the lanes of a row", "      sum += shuffle_xor(sum, 2);\n", ""),
    _attention(
        "sum not scaled to the new maximum",
        "result.sum[i][half] * shrink[half] + sum",
        "result.sum[i][half] + sum",
    ),
    _attention(
        "values not scaled to the new maximum",
        "any_of_warp(shrink[0] != 1.f || shrink[1] != 1.f)",
        "any_of_warp(shrink[0] > 1.f)",
    ),
    _attention(
        "one row's maximum decides for two",
        "result.out[i][j][x] *= shrink[x / 2]",
        "result.out[i][j][x] *= shrink[x % 2]",
    ),
    _attention(
        "minus infinity less minus infinity",
        "const float base = most == -INFINITY ? 0.f : most;  // no key seen yet",
        "const float base = most;",
    ),
    _attention(
        "logits not scaled", "weight[i][j / 4][j % 4] *= p.scale", "weight[i][j / 4][j % 4] *= 1.f"
    ),
    _attention(
        "log-sum-exp to base two", "return (most + log2f(sum)) * kLn2;", "return most + log2f(sum);"
    ),
    _attention(
        "warps joined without their maxima",
        "out = out * mine[x / 2] + *place * other[x / 2]",
        "out = out + *place",
    ),
    # Parts and lists.
    _attention(
        "parts of every row read from the first",
        "const int first = part * reading.keys_a_part;",
        "const int first = 0;",
    ),
    _attention(
        "parts joined without their maxima",
        "const float weight = power_of_2(stats.x - most);",
        "const float weight = 1.f;",
    ),
    _attention(
        "one part too few joined",
        "for (int part = 0; part < reading.parts; ++part) {",
        "for (int part = 0; part < reading.parts - 1; ++part) {",
    ),
    _attention(
        "parts in each other's place",
        "* p.max_parts + part) * all_rows + row",
        "* p.max_parts) * all_rows + row",
    ),
    _attention("the list read though everything is", "p.counts && count != length ?", "p.counts ?"),
    _attention(
        "parts by what is cached instead of what is read",
        "parts = parts_of(keys,",
        "parts = parts_of(length + p.rows,",
    ),
    _attention(
        "new tokens behind what is read instead of what is cached",
        "return length + (j - count);",
        "return j;",
    ),
    _attention(
        "a row of the index list by the budget",
        "p.indices + b * p.indices_stride",
        "p.indices + b * count",
    ),
    Mutant(
        "token and page swapped",
        "cache.cuh",
        "token % page_size * token_stride",
        "token / page_size * token_stride",
    ),
    Mutant(
        "the page table's first row for all",
        "cache.cuh",
        "cache.page_table + b * cache.page_table_stride",
        "cache.page_table",
    ),
    # kv_append.
    Mutant(
        "values from the keys",
        "kv_append.cuh",
        "load_word(row_of(p.v, b, row, head)",
        "load_word(row_of(p.k, b, row, head)",
    ),
    Mutant(
        "new tokens one too late",
        "kv_append.cuh",
        "cache.lengths[b] + row",
        "cache.lengths[b] + row + 1",
    ),
    Mutant("rows by heads", "kv_append.cuh", "i / words % heads", "i / words % p.rows"),
    Mutant("threads past the end", "kv_append.cuh", "if (i >= p.rows * heads * words) return;", ""),
    # srh_score.
    _score(
        "no barrier after the queries are there",
        "  key.load(keys, places, first, end);\n  __syncthreads();",
        "  key.load(keys, places, first, end);",
    ),
    _score(
        "no barrier before the logits are read",
        "    key = next;\n  }\n  __syncthreads();",
        "    key = next;\n  }",
    ),
    _score(
        "no barrier before the sums are used",
        "  __syncthreads();\n\n  const float* const logits",
        "  const float* const logits",
    ),
    _score("rows of padding kept", "if (j < end && row < rows)", "if (j < end)"),
    _score("keys past the end kept", "if (j < end && row < rows)", "if (row < rows)"),
    _score(
        "a chunk's end one key early",
        "const int begin = chunk * kKeysAChunk, end = min(length,",
        "const int begin = chunk * kKeysAChunk, end = min(length - 1,",
    ),
    _score(
        "upper and lower keys swapped",
        "key.low[i].x, key.high[i].x, key.low[i].y",
        "key.high[i].x, key.low[i].x, key.low[i].y",
    ),
    _score(
        "dimensions of keys and queries permuted differently",
        "key.low[i].z, key.high[i].z, key.low[i].w, key.high[i].w, q.z, q.w",
        "key.low[i].z, key.high[i].z, key.low[i].w, key.high[i].w, q.w, q.z",
    ),
    _score(
        "the last 16 dimensions left out",
        "        multiply_add<T>(c, key.low_rest.x",
        "        if (D != 80) multiply_add<T>(c, key.low_rest.x",
    ),
    _score(
        "heads and rows of a group swapped",
        "row_of(p.queries, b, row / columns, p.columns[first_column + row % columns])",
        "row_of(p.queries, b, row % p.rows, p.columns[first_column + row / columns % columns])",
    ),
    _score(
        "chunks joined without their maxima",
        "stats[chunk].y * power_of_2(stats[chunk].x - most)",
        "stats[chunk].y",
    ),
    _score(
        "the first chunk's statistics for all",
        "stats[int64_t{row} * p.chunks + chunk] =",
        "stats[int64_t{row} * p.chunks] =",
    ),
    _score("weights not divided by their sum", "* all[row].y", "* 1.f"),
    _score("scores replaced instead of added to", "scores[j] += sum;", "scores[j] = sum;"),
    _score("scores past the history", "if (j >= length) continue;", ""),
    _score(
        "the next keys from this tile",
        "next.load(keys, places, first + kScoreWarps * 16, end)",
        "next.load(keys, places, first, end)",
    ),
    # select_tokens.
    _select(
        "no barrier after the histogram is cleared",
        "shared_.histogram[bin] = 0;\n    __syncthreads();",
        "shared_.histogram[bin] = 0;",
    ),
    _select("histogram not cleared", "shared_.histogram[bin] = 0;", "{}"),
    _select(
        "no barrier before the histogram is read",
        "add_shared(&shared_.histogram[bin], 1);\n    }\n    __syncthreads();",
        "add_shared(&shared_.histogram[bin], 1);\n    }",
    ),
    _select(
        "no barrier before warps' sums are read",
        "shared_.sums[warp_] = sum;\n    __syncthreads();",
        "shared_.sums[warp_] = sum;",
    ),
    _select(
        "ties to the higher index",
        "chosen_[word] |= bits & (0u - bits);",
        "chosen_[word] |= 0x80000000u >> __builtin_clz(bits);",
    ),
    _select("one tie too many", "bits && before < count", "bits && before <= count"),
    _select(
        "NaN as the least score",
        "if (score != score) return 0xffffffffu;",
        "if (score != score) return 0u;",
    ),
    _select("-0 below 0", "bits_of(score + 0.f)", "bits_of(score)"),
    _select(
        "negative scores in the wrong order",
        "bits & 0x80000000u ? ~bits : bits | 0x80000000u",
        "bits ^ 0x80000000u",
    ),
    _select("a digit of ten bits", "shift == 0 ? 0x3ffu : 0x7ffu", "0x3ffu"),
    _select("higher digits forgotten", "known |= digit << shift;", "known = digit << shift;"),
    _select(
        "the bin below",
        "shared_.bin = in_upper ? top : top - 1;",
        "shared_.bin = in_upper ? top - 1 : top;",
    ),
    _select("scores above not taken off", "count -= find_digit(", "find_digit("),
    _select(
        "a window one token short",
        "range_bits(word, length - window, length)",
        "range_bits(word, length - window + 1, length)",
    ),
    _select("the sink chosen twice", "!(chosen_[word] >> lane() & 1u)", "true"),
    _select("a sum that counts itself", "return sum - x +", "return sum +"),
    _select("the tail of a row left out", "(length + 31) / 32", "length / 32"),
    _select(
        "draft and target swapped",
        "if (draft) row.take_top(draft, ahead);",
        "if (draft) row.take_top(target, ahead);",
    ),
    _select("lookahead unbounded", "min(p.lookahead, free)", "p.lookahead"),
    _select("no padding", "i >= count ? -1 :", "i >= count ? 0 :"),
)
