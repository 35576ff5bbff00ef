/* Reductions of an array of outer * n * inner elements over its middle dimension; or, if `pieces` is
   not 1, of pieces * outer * n elements over its first and last dimensions (inner is 1). */
#include "sums.h"

INLINE void finish(int kind, double sum, double divisor, long root, void *out, long i) {
  sum = root ? __builtin_sqrt(sum / divisor) : sum / divisor;
  if (kind == DOUBLES)
    ((double *)out)[i] = sum;
  else
    ((float *)out)[i] = (float)sum;
}

INLINE void reduce_kind(int kind, long outer, long pieces, long n, long inner, const char *x,
                        double divisor, long root, void *out) {
  long size = kind == DOUBLES ? sizeof(double) : sizeof(float);
  if (inner == 1) {
    for (long row = 0; row < outer; row++, x += n * size) {
      double lanes[LANES] = {0};
      for (long i = 0; i < pieces; i++)
        add_terms(kind, lanes, 0, i * n, n, x + i * outer * n * size, 0, 0);
      finish(kind, sum_of(lanes), divisor, root, out, row);
    }
    return;
  }
  for (long block = 0; block < outer; block++)
    for (long from = 0; from < inner; from += TILE) {
      long width = smaller(TILE, inner - from);
      const Columns in = {.x = x + (block * n * inner + from) * size};
      double sums[TILE];
      sum_columns(kind, n, width, inner, in, sums, 0);
      for (long j = 0; j < width; j++)
        finish(kind, sums[j], divisor, root, out, block * inner + from + j);
    }
}

/* out = the sum of a kind's terms, divided by the divisor, of which the square root if `root`. */
PORTABLE void reduce(long kind, long outer, long pieces, long n, long inner, const void *x,
                     double divisor, long root, void *out) {
#define CASE(kind) \
  case kind: reduce_kind(kind, outer, pieces, n, inner, x, divisor, root, out); break;
  switch (kind) {
    CASE(VALUES)
    CASE(SIZES)
    CASE(SQUARES)
    CASE(NONZEROS)
    CASE(NUMBERS)
    CASE(DOUBLES)
  }
#undef CASE
}

/* mean = sum / n; out = the sum of squared deviations / divisor, of which the square root if
   `root`. The deviations are those from the mean in double. */
PORTABLE void variance(long outer, long pieces, long n, long inner, const float *x, double divisor,
                       long root, float *mean, float *out) {
  long tile = inner == 1 ? 1 : TILE, step = inner == 1 ? outer * n : inner;
  long batch = inner == 1 ? pieces : n, length = inner == 1 ? n : 1;
  for (long block = 0; block < outer; block++, x += n * inner)
    for (long from = 0; from < inner; from += tile) {
      long width = smaller(tile, inner - from), at = block * inner + from;
      double centres[TILE], sums[TILE];
      sum_channels(VALUES, batch, length, width, step, x + from, 0, 0, centres, 0);
      for (long j = 0; j < width; j++) {
        centres[j] /= (double)(pieces * n);
        mean[at + j] = (float)centres[j];
      }
      sum_channels(DEVIATIONS, batch, length, width, step, x + from, 0, centres, sums, 0);
      for (long j = 0; j < width; j++) finish(VALUES, sums[j], divisor, root, out, at + j);
    }
}

INLINE double next(long products, double before, float x) {
  return products ? before * (double)x : before + (double)x;
}

/* Sums, or products, of the first 1, 2, ... n elements: one after the other in double, each
   rounded. `scratch` has room for `inner` doubles. */
PORTABLE void cumulate(long products, long outer, long n, long inner, const float *x, float *out,
                       double *scratch) {
  for (long block = 0; block < outer; block++, x += n * inner, out += n * inner) {
    double one = products ? 1 : 0;
    for (long i = 0; inner == 1 && i < n; i++) out[i] = (float)(one = next(products, one, x[i]));
    if (inner == 1) continue;
    for (long j = 0; j < inner; j++) scratch[j] = one;
    for (long i = 0; i < n * inner; i += inner)
      for (long j = 0; j < inner; j++)
        out[i + j] = (float)(scratch[j] = next(products, scratch[j], x[i + j]));
  }
}
