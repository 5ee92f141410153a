// What can be said of an op's arguments without looking into the batch's data, which may be on a
// device: shapes, pointers, and lists in host memory. Each refuses what no backend takes, and
// returns whether there is anything to do.
#pragma once

#include "dustin/kernels.h"

namespace dustin {

bool check_arguments(const DustinKvAppendParams& params);
bool check_arguments(const DustinSrhScoreParams& params);
bool check_arguments(const DustinSelectTokensParams& params);
bool check_arguments(const DustinDenseAttentionParams& params);
bool check_arguments(const DustinSparseAttentionParams& params);

// Of the three dtypes of the C ABI.
void check_dtype(int32_t dtype);

}  // namespace dustin
