/* The product of two matrices that lie anywhere in memory: what convolutions are made of, too. */
#ifndef EVENSTEP_PRODUCTS_H
#define EVENSTEP_PRODUCTS_H

#include "portable.h"

/* c(i, j) = the chain over k of fma(a(i, k), b(k, j), sum), ascending, that begins with +0.

   The place of an element is a sum: a(i, k) is a[a_row[i] + a_depth[k]], and so for b and c. */
struct product {
  long rows, columns, depth;
  const float *a;
  const long *a_row, *a_depth;
  const float *b;
  const long *b_depth, *b_column;
  float *c;
  const long *c_row, *c_column;
  int is_begun;  /* chains go on from what c holds, instead of beginning with +0 */
  int is_partial; /* more of the chains is to come: don't finish */
  /* At last, c = fma(beta, addend, alpha * c), or alpha * c if `addend` is null. */
  float alpha, beta;
  const float *addend;
  long addend_row, addend_column; /* strides */
};

/* In `c_column`: a column that is not written. */
#define NOWHERE (-1L)

/* Of so many rows or fewer, b is read in place where its columns lie one behind the other. */
#define FEW_ROWS 36

/* The working memory of `multiply`, in floats; its address is a multiple of 64 bytes. */
#define MULTIPLY_SCRATCH (1L << 19)

/* Prepare the working memory for products of this depth, or a smaller one: once for many calls. */
void prepare(long depth, float *scratch);

void multiply(const struct product *p, float *scratch);

/* A product of matrices whose rows and columns lie at constant distances: fills the tables, which
   take 4 * (rows + columns + depth) floats behind the working memory. The strides are those of a's
   rows and depth, of b's depth and columns, and of c's rows. */
void multiply_strided(struct product *p, const long a[2], const long b[2], long c_row,
                      float *scratch);

/* table[i] = i * stride; returns the memory behind the table */
INLINE float *strided(long count, long stride, long *table) {
  for (long i = 0; i < count; i++) table[i] = i * stride;
  return (float *)(table + count);
}

#endif
