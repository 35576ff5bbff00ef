/* Reductions of an array of outer * n * inner elements over its middle dimension; or, if `pieces` is
   not 1, of pieces * outer * n elements over its first and last dimensions (inner is 1). */
#include "sums.h"

/* The sums of a kind's terms. For DEVIATIONS, those are from the mean in double, which `mean` gets. */
INLINE void reduce_kind(int kind, long outer, long pieces, long n, long inner, const char *x,
                        double divisor, long root, float *mean, void *out) {
  if (inner == 1 && n == 1) n = pieces, inner = outer, outer = pieces = 1;
  long size = kind == DOUBLES ? sizeof(double) : sizeof(float), tile = inner == 1 ? 1 : TILE;
  long batch = inner == 1 ? pieces : n, length = inner == 1 ? n : 1;
  long step = inner == 1 ? outer * n : inner;
  for (long block = 0; block < outer; block++, x += n * inner * size)
    for (long from = 0; from < inner; from += tile) {
      long width = smaller(tile, inner - from), at = block * inner + from;
      const char *own = x + from * size;
      double centres[TILE], sums[TILE];
      if (kind == DEVIATIONS) {
        sum_channels(VALUES, batch, length, width, step, own, 0, 0, centres, 0);
        for (long j = 0; j < width; j++) {
          centres[j] /= (double)(pieces * n);
          mean[at + j] = (float)centres[j];
        }
      }
      const double *from_mean = kind == DEVIATIONS ? centres : 0;
      sum_channels(kind, batch, length, width, step, own, 0, from_mean, sums, 0);
      for (long j = 0; j < width; j++) {
        double sum = root ? __builtin_sqrt(sums[j] / divisor) : sums[j] / divisor;
        if (kind == DOUBLES) ((double *)out)[at + j] = sum;
        else ((float *)out)[at + j] = (float)sum;
      }
    }
}

/* out = the sum of a kind's terms, divided by the divisor, of which the square root if `root`. */
PORTABLE void reduce(long kind, long outer, long pieces, long n, long inner, const void *x,
                     double divisor, long root, float *mean, void *out) {
#define CASE(kind) \
  case kind: reduce_kind(kind, outer, pieces, n, inner, x, divisor, root, mean, out); break;
  switch (kind) {
    CASE(VALUES) CASE(SIZES) CASE(SQUARES) CASE(NONZEROS) CASE(NUMBERS) CASE(DOUBLES) CASE(DEVIATIONS)
  }
#undef CASE
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
