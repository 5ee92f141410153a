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
    _attention(
        "a tile's place looked up one tile late",
        "const int ahead = (tile + p.stages) * Shape::kKeys + thread;",
        "const int ahead = (tile + p.stages - 1) * Shape::kKeys + thread;",
    ),
    _attention(
        "the first page for keys found ahead",
        "const int page = places.page(token);\n    const int ahead",
        "const int page = places.page(token < 0 ? token : 0);\n    const int ahead",
    ),
    _attention(
        "copies never committed in the loop",
        "    commit_copies();\n\n    const int first_key",
        "    const int first_key",
    ),
    _attention(
        "only the first stage found before copying",
        "key < p.stages * Shape::kKeys; key += Shape::kThreads",
        "key < Shape::kKeys; key += Shape::kThreads",
    ),
    _attention(
        "places that overlap the tiles",
        "kOffsetBytes = kMaxStages * kKeys * 8;",
        "kOffsetBytes = kMaxStages * kKeys * 4;",
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
    _attention(
        "keys end before the block's last row",
        "reading.count + last_row / p.group + 1);",
        "reading.count + last_row / p.group);",
    ),
    _attention(
        "parts that end within a tile",
        "((keys + parts - 1) / parts + 63) / 64 * 64;",
        "(keys + parts - 1) / parts;",
    ),
    _attention(
        "mask without the second row of a lane",
        "const int row = min(first_row + i * 16 + half * 8 + g, all_rows - 1);\n            const int limit",
        "const int row = min(first_row + i * 16 + g, all_rows - 1);\n            const int limit",
    ),
    _attention(
        "row warps that share rows",
        "row_block * Shape::kRows + row_warp * 16 * kTiles;",
        "row_block * Shape::kRows + row_warp * 16;",
    ),
    _attention("parts a row does not have", "  if (part >= reading.parts) return;\n", ""),
    _attention(
        "parts and row blocks swapped",
        "part = blockIdx.x % p.max_parts, row_block = blockIdx.x / p.max_parts;",
        "part = blockIdx.x / (gridDim.x / p.max_parts), row_block = blockIdx.x % p.max_parts;",
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
    _attention(
        "queries' rows and columns swapped in the fragment",
        "multiply_add<T>(weight[i][0], q[0], q[1], q[2], q[3]",
        "multiply_add<T>(weight[i][0], q[0], q[2], q[1], q[3]",
    ),
    _attention(
        "halves of a value's fragment swapped",
        "w[0], w[1], w[2], w[3], value[0], value[1]);",
        "w[0], w[1], w[2], w[3], value[1], value[0]);",
    ),
    _attention(
        "every step from the same dimensions",
        "load_matrices(key, k_row + step * 16);",
        "load_matrices(key, k_row);",
    ),
    _attention(
        "elements of a word swapped",
        "packed[i][0] = pack<T>(weight[i][0][0], weight[i][0][1]);",
        "packed[i][0] = pack<T>(weight[i][0][1], weight[i][0][0]);",
    ),
    _attention(
        "a key warp with its neighbour's keys",
        "staged + stage * 2 * Shape::kTileElements + key_warp * 16 * Shape::kPitch;",
        "staged + stage * 2 * Shape::kTileElements + key_warp * 8 * Shape::kPitch;",
    ),
    _attention(
        "columns of the output by lane, not by pair",
        "store_word(out + j * 8 + 2 * t,",
        "store_word(out + j * 8 + t / 2 * 4,",
    ),
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
    _attention(
        "only one row's maximum asked for",
        "any_of_warp(shrink[0] != 1.f || shrink[1] != 1.f)",
        "any_of_warp(shrink[0] != 1.f)",
    ),
    _attention(
        "maxima of the two warps swapped",
        "out = out * mine[x / 2] + *place * other[x / 2];",
        "out = out * other[x / 2] + *place * mine[x / 2];",
    ),
    _attention(
        "sums joined without their maxima",
        "result.sum[i][half] * mine[half] + place[32] * other[half]",
        "result.sum[i][half] + place[32]",
    ),
    _attention(
        "row warps hand over in one place",
        "(key_warp % ways * Shape::kRowWarps + row_warp) * Shape::kResultWords",
        "(key_warp % ways) * Shape::kResultWords",
    ),
    _attention(
        "key warps hand over in one place",
        "(key_warp % ways * Shape::kRowWarps + row_warp) * Shape::kResultWords",
        "row_warp * Shape::kResultWords",
    ),
    _attention(
        "warps joined once",
        "for (int ways = Shape::kKeyWarps / 2; ways > 0; ways /= 2)",
        "for (int ways = Shape::kKeyWarps / 2; ways > 0; ways /= 4)",
    ),
    _attention("every key warp writes", "  if (key_warp > 0) return;\n", ""),
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
    _attention(
        "log-sum-exp by head, then row",
        "        if (p.lse && t == 0)\n          p.lse[(int64_t{b} * p.rows + query_row) * p.heads + head]",
        "        if (p.lse && t == 0)\n          p.lse[(int64_t{b} * p.heads + head) * p.rows + query_row]",
    ),
    _attention(
        "log-sum-exp though nobody asks", "        if (p.lse && t == 0)\n", "        if (t == 0)\n"
    ),
    _attention(
        "log-sum-exp of joined parts by KV head",
        "  if (p.lse && lane == 0)\n    p.lse[(int64_t{b} * p.rows + query_row) * p.heads + head]",
        "  if (p.lse && lane == 0)\n    p.lse[(int64_t{b} * p.rows + query_row) * p.heads + kv_head]",
    ),
    _attention(
        "the last part's maximum for all",
        "    most = fmaxf(most, p.stats[first + int64_t{part} * all_rows].x);",
        "    most = p.stats[first + int64_t{part} * all_rows].x;",
    ),
    _attention("sums of parts not weighed", "sum += weight * stats.y;", "sum += stats.y;"),
    _attention(
        "rows joined that have one part",
        "if (at >= all_rows * p.cache.num_kv_heads || reading.parts == 1) return;",
        "if (at >= all_rows * p.cache.num_kv_heads) return;",
    ),
    _attention(
        "rows joined that do not exist",
        "if (at >= all_rows * p.cache.num_kv_heads || reading.parts == 1) return;",
        "if (reading.parts == 1) return;",
    ),
    _attention(
        "a part's sum of one lane's columns",
        "if (t == 0) p.stats[at] = make_float2(most, sum);",
        "if (t == 0) p.stats[at] = make_float2(most, result.sum[i][half]);",
    ),
    _attention(
        "history in place of the count",
        "if (j >= count) return length + (j - count);",
        "if (j >= length) return length + (j - length);",
    ),
    Mutant(
        "strides of rows and heads swapped",
        "cache.cuh",
        "row * rows.row_stride +\n         head * rows.head_stride",
        "row * rows.head_stride +\n         head * rows.row_stride",
    ),
    Mutant(
        "batch of rows without its stride",
        "cache.cuh",
        "b * rows.batch_stride + row",
        "b * rows.row_stride + row",
    ),
    Mutant(
        "every KV head the first", "cache.cuh", "+ kv_head * cache.head_stride", "+ 0 * kv_head"
    ),
    Mutant(
        "pages without their table",
        "cache.cuh",
        "const int page = table[number];",
        "const int page = number;",
    ),
    Mutant(
        "pages and tokens with each other's stride",
        "cache.cuh",
        "page * page_stride + token % page_size * token_stride",
        "page * token_stride + token % page_size * page_stride",
    ),
    _attention(
        "one KV head's parts for all",
        "(int64_t{b} * p.cache.num_kv_heads + kv_head) * p.max_parts * all_rows + row;",
        "int64_t{b} * p.cache.num_kv_heads * p.max_parts * all_rows + row;",
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
    Mutant(
        "half of every head",
        "kv_append.cuh",
        "static_cast<int>(i % words) * 2;",
        "static_cast<int>(i % words);",
    ),
    Mutant(
        "values to the first head",
        "kv_append.cuh",
        "store_word(head_of(cache.v, cache, head) + to",
        "store_word(head_of(cache.v, cache, 0) + to",
    ),
    Mutant(
        "the first row's length for all",
        "kv_append.cuh",
        "cache.lengths[b] + row",
        "cache.lengths[0] + row",
    ),
    Mutant(
        "a block's first words for all",
        "kv_append.cuh",
        "const uint32_t i = blockIdx.x * kAppendThreads + threadIdx.x;",
        "const uint32_t i = threadIdx.x;",
    ),
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
    _score(
        "columns of another KV head's group",
        "p.columns[first_column + row % columns]",
        "p.columns[row % columns]",
    ),
    _score(
        "query rows that overlap in shared memory",
        "kQueryPieces = (D / 8 + 3) / 8 * 8 + 4;",
        "kQueryPieces = D / 8 - 1;",
    ),
    _score("query rows rounded down", "padded = (rows + 7) / 8 * 8;", "padded = rows / 8 * 8;"),
    _score("second half of the keys four too early", "b = first + 8 + g;", "b = first + 4 + g;"),
    _score(
        "every other tile of keys left out",
        "first < end; first += kScoreWarps * 16)",
        "first < end; first += 2 * kScoreWarps * 16)",
    ),
    _score(
        "keys past the end read",
        "load(high, high_rest, b < length ?",
        "load(high, high_rest, b < length + 1 ?",
    ),
    _score("scores' logits not scaled", "= c[i] * p.scale;", "= c[i];"),
    _score(
        "c's rows and columns swapped",
        "first + g + 8 * (i / 2), row = tile + 2 * t + i % 2;",
        "first + g + 8 * (i % 2), row = tile + 2 * t + i / 2;",
    ),
    _score(
        "a chunk's sum of one lane's keys alone",
        "    for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);\n    if (lane == 0) stats",
        "    if (lane == 0) stats",
    ),
    _score(
        "a chunk's maximum of one lane's keys alone",
        "fmaxf(most, mine[j]);\n    for (int by = 16; by > 0; by /= 2) most = fmaxf(most, shuffle_xor(most, by));",
        "fmaxf(most, mine[j]);",
    ),
    _score(
        "sums of every other lane alone",
        "    for (int by = 16; by > 0; by /= 2) sum += shuffle_xor(sum, by);\n    if (lane == 0) all[row]",
        "    for (int by = 16; by > 1; by /= 2) sum += shuffle_xor(sum, by);\n    if (lane == 0) all[row]",
    ),
    _score(
        "the last chunk left out",
        "chunks = (length + kKeysAChunk - 1) / kKeysAChunk;",
        "chunks = length / kKeysAChunk;",
    ),
    _score(
        "statistics of the first batch row",
        "p.stats + (int64_t{b} * rows + row) * p.chunks;",
        "p.stats + int64_t{row} * p.chunks;",
    ),
    _score("logits of the first batch row", "p.logits + int64_t{b} * rows * p.width;", "p.logits;"),
    _score(
        "the first 256 keys of a block only",
        "i < kKeysAnAddBlock / kScoreThreads; ++i",
        "i < 1; ++i",
    ),
    _score(
        "the first block's keys for every block",
        "begin = blockIdx.x * kKeysAnAddBlock;",
        "begin = 0 * blockIdx.x;",
    ),
    _score(
        "chunks of one turn of the lanes",
        "for (int chunk = lane; chunk < chunks; chunk += 32)\n      sum +=",
        "if (const int chunk = lane; chunk < chunks)\n      sum +=",
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
    _select(
        "no barrier after sink and window are chosen",
        "range_bits(word, length - window, length);\n    __syncthreads();",
        "range_bits(word, length - window, length);",
    ),
    _select(
        "no barrier before equal scores are counted",
        "    __syncthreads();\n    take_first(count);",
        "    take_first(count);",
    ),
    _select(
        "no barrier before the digit is read",
        "    __syncthreads();\n    return shared_.above;",
        "    return shared_.above;",
    ),
    _select(
        "lanes counted at once counted once",
        "add_shared(&shared_.histogram[bin], population(alike));",
        "add_shared(&shared_.histogram[bin], 1);",
    ),
    _select(
        "the leader's bin counted twice",
        "if (counts && bin != leading_bin) add_shared",
        "if (counts) add_shared",
    ),
    _select(
        "sum of a warp without its neighbour",
        "if (lane() >= by) sum += other;",
        "if (lane() > by) sum += other;",
    ),
    _select(
        "sums of warps without the first",
        "if (lane() >= by) warps += other;",
        "if (lane() > by) warps += other;",
    ),
    _select("the first warp takes the last one's sum", "(warp_ > 0 ? earlier : 0)", "earlier"),
    _select(
        "a whole word of bits shifted by 32",
        "count >= 32 ? 0xffffffffu",
        "count > 32 ? 0xffffffffu",
    ),
    _select(
        "scores above without the upper bin",
        "shared_.above = in_upper ? before : before + upper;",
        "shared_.above = before;",
    ),
    _select(
        "the bin of a count that is just reached missed",
        "count <= before + upper + lower)",
        "count < before + upper + lower)",
    ),
    _select(
        "equal to the prefix counted as more",
        "ballot(free && order > prefix)",
        "ballot(free && order >= prefix)",
    ),
    _select("something chosen where nothing is left to", "    if (count <= 0) return;\n", ""),
    _select(
        "draft scores ignored where they are the only ones",
        "    target = draft;\n    draft = nullptr;",
        "    draft = nullptr;",
    ),
    _select(
        "the draft's share chosen again",
        "row.take_top(target, free - ahead);",
        "row.take_top(target, free);",
    ),
    _select(
        "the budget as every row's count",
        "if (thread == 0) p.counts[b] = count;",
        "if (thread == 0) p.counts[b] = p.budget;",
    ),
    _select(
        "rows of indices by the budget",
        "p.indices + b * p.indices_stride;",
        "p.indices + b * p.budget;",
    ),
    _select(
        "draft's rows by the target's first",
        "p.draft_scores + b * p.draft_stride",
        "p.draft_scores",
    ),
    _select("without scores, the first tokens alone", "i < sink ? i : i + skipped;", "i;"),
    _select(
        "one set of bits for two",
        "(2 * words_of(length) + 3) / 4 * 16;",
        "(words_of(length) + 3) / 4 * 16;",
    ),
    _select(
        "a word of bits a thread, however long the row",
        "const int each = (words_ + kSelectThreads - 1) / kSelectThreads;",
        "const int each = 1;",
    ),
    # What the launches are given.
    Mutant(
        "rows of heads forgotten in the launch",
        "attention_launch.cuh",
        "const int64_t all_rows = int64_t{p.rows} * p.group;",
        "const int64_t all_rows = int64_t{p.rows};",
    ),
    Mutant(
        "a join for four rows too few",
        "attention_launch.cuh",
        "(all_rows * p.cache.num_kv_heads + 3) / 4)",
        "(all_rows * p.cache.num_kv_heads + 3) / 4 - 1)",
    ),
    Mutant(
        "parts never joined",
        "attention_launch.cuh",
        "  if (p.max_parts == 1) return;\n",
        "  return;\n",
    ),
    Mutant(
        "more stages than fit",
        "attention_launch.cuh",
        "while (p.stages > 2 && Shape::shared_bytes(p.stages) > room) --p.stages;",
        "",
    ),
    Mutant(
        "logits to base e, exponentials to base two",
        "attention.cu",
        "constexpr float kLog2E = 1.44269504088896f;",
        "constexpr float kLog2E = 1.f;",
    ),
    Mutant(
        "statistics over the parts' values",
        "attention.cu",
        "static_cast<char*>(workspace) + partial_bytes)",
        "static_cast<char*>(workspace) + partial_bytes / 2)",
    ),
    Mutant(
        "no room for the parts' statistics",
        "attention.cu",
        "workspace_bytes = partial_bytes + results * int64_t{sizeof(float2)};",
        "workspace_bytes = partial_bytes;",
    ),
    Mutant(
        "parts of the history alone",
        "attention.cu",
        "parts_of(history + p.rows, query_rows)",
        "parts_of(history, query_rows)",
    ),
    Mutant(
        "query heads in the caller's order",
        "srh_score.cu",
        "params_.columns[placed++] = static_cast<uint8_t>(i);",
        "params_.columns[placed] = static_cast<uint8_t>(placed), ++placed;",
    ),
    Mutant(
        "groups numbered instead of named",
        "srh_score.cu",
        "params_.kv_heads[params_.groups] = static_cast<uint16_t>(kv_head);",
        "params_.kv_heads[params_.groups] = static_cast<uint16_t>(params_.groups);",
    ),
    Mutant(
        "room for the last group's queries",
        "srh_score.cu",
        "largest_group_ = std::max(largest_group_, placed - first);",
        "largest_group_ = placed - first;",
    ),
    Mutant(
        "a chunk too few",
        "srh_score.cu",
        "static_cast<int32_t>((longest_ + kKeysAChunk - 1) / kKeysAChunk);",
        "static_cast<int32_t>(std::max<int64_t>(1, longest_ / kKeysAChunk));",
    ),
    Mutant(
        "scores' logits to base e",
        "srh_score.cu",
        "constexpr float kLog2E = 1.44269504088896f;",
        "constexpr float kLog2E = 1.f;",
    ),
)
