/* Sums into places that an index gives, one after the other in the order of the index. */
#include "portable.h"

/* Whether a place is in [0, depth). */
INLINE int fits(int64_t at, long depth) { return (uint64_t)at < (uint64_t)depth; }

/* out[o][at[o][i]] += rows[o][i] for i = 0, 1, ...: arrays of `outer` blocks, of n rows, of `length`
   numbers each; `out` has `depth` rows in each block. `step` is n if each block has places of its own,
   0 if they share them. Rows for the place `skipped` are left out, and so are
   those for places outside: *wrong says how many. */
PORTABLE void add_rows(long outer, long n, long depth, long length, const int64_t *at, long step,
                       const float *rows, long skipped, float *out, int64_t *wrong) {
  int64_t count = 0;
  for (long o = 0; o < outer; o++, at += step, out += depth * length)
    for (long i = 0; i < n; i++, rows += length) {
      if (at[i] == skipped) continue;
      float *sum = out + at[i] * length;
      if (!fits(at[i], depth)) count++;
      else if (length == 1) *sum += *rows;
      else
        for (long j = 0; j < length; j++) sum[j] += rows[j];
    }
  *wrong = count;
}

/* out[o][at[o][i][j]][j] += values[o][i][j] for i = 0, 1, ...: each number has a place. */
PORTABLE void add_elements(long outer, long n, long depth, long length, const int64_t *at,
                           const float *values, float *out, int64_t *wrong) {
  int64_t count = 0;
  for (long o = 0; o < outer; o++, out += depth * length)
    for (long i = 0; i < n; i++, at += length, values += length)
      for (long j = 0; j < length; j++) {
        if (fits(at[j], depth)) out[at[j] * length + j] += values[j];
        else count++;
      }
  *wrong = count;
}
