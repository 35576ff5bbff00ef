/* The order of every sum of portable arithmetic.

   Of n terms, numbered wherever they lie in memory, term i is added to lane i mod 16: in binary64,
   in ascending order, from +0. Then lanes 8 to 15 are added to lanes 0 to 7, 4 to 7 to 0 to 3, and
   so on. The caller rounds the sum to float once.

   A `kind` is a constant where it is given, so each kind is compiled to loops of its own. */
#ifndef EVENSTEP_SUMS_H
#define EVENSTEP_SUMS_H

#include "portable.h"

#define LANES 16
#define TILE 64 /* columns whose lanes are in memory at a time: 8 KiB */
#define EACH 4  /* rows of one lane that are added before its sums are stored */
#define APART static __attribute__((noinline, unused))

/* What is added for each element x, and for y at the same place. */
enum {
  VALUES,     /* x */
  SIZES,      /* |x| */
  SQUARES,    /* x², exact */
  NONZEROS,   /* 1, or 0 for x = 0 */
  NUMBERS,    /* x, or 0 for NaN */
  DOUBLES,    /* x, a double */
  DEVIATIONS, /* (x - centre)² */
  DOTS,       /* y * x, exact */
  PRODUCTS,   /* y * (x - centre) */
  SCALED      /* y * ((x - centre) * scale), centre and scale being those of the row */
};

INLINE double term(int kind, const void *x, const float *y, long i, double centre, double scale) {
  if (kind == DOUBLES) return ((const double *)x)[i];
  double value = (double)((const float *)x)[i];
  switch (kind) {
    case SIZES: return __builtin_fabs(value);
    case SQUARES: return value * value;
    case NONZEROS: return value == 0 ? 0.0 : 1.0;
    case NUMBERS: return value == value ? value : 0.0;
    case DEVIATIONS: return (value - centre) * (value - centre);
    case DOTS: return (double)y[i] * value;
    case PRODUCTS: return (double)y[i] * (value - centre);
    case SCALED: return (double)y[i] * ((value - centre) * scale);
    default: return value;
  }
}

/* The sum of lanes that lie `step` apart. */
INLINE double sum_apart(const double *lanes, long step) {
#define TWO(i) (lanes[(i)*step] + lanes[((i) + 8) * step])
#define FOUR(i) (TWO(i) + TWO((i) + 4))
  return (FOUR(0) + FOUR(2)) + (FOUR(1) + FOUR(3));
#undef TWO
#undef FOUR
}

APART double sum_of(const double *lanes) { return sum_apart(lanes, 1); }

/* Add blocks of LANES terms to the lanes; and each y to those of `also`, if that is not null. */
INLINE void add_blocks(int kind, double *lanes, double *also, long blocks, const void *x,
                       const float *y, double centre) {
  double sums[LANES], more[LANES]; /* in registers */
  memcpy(sums, lanes, sizeof sums);
  if (also) memcpy(more, also, sizeof more);
  for (long block = 0; block < blocks; block++)
    for (int lane = 0; lane < LANES; lane++) {
      sums[lane] += term(kind, x, y, block * LANES + lane, centre, 1);
      if (also) more[lane] += (double)y[block * LANES + lane];
    }
  memcpy(lanes, sums, sizeof sums);
  if (also) memcpy(also, more, sizeof more);
}

/* Functions of their own, so that the code around a call can't keep a loop from being compiled for
   vectors. */
typedef void Blocks(double *, double *, long, const void *, const float *, double);
#define BLOCKS(kind)                                                                      \
  APART void blocks_of_##kind(double *lanes, double *more, long blocks, const void *x,    \
                              const float *y, double centre) {                            \
    add_blocks(kind, lanes, kind == PRODUCTS ? more : 0, blocks, x, y, centre);           \
  }
BLOCKS(VALUES) BLOCKS(SIZES) BLOCKS(SQUARES) BLOCKS(NONZEROS) BLOCKS(NUMBERS) BLOCKS(DOUBLES)
BLOCKS(DEVIATIONS) BLOCKS(DOTS) BLOCKS(PRODUCTS)
#define NAMED(kind) [kind] = blocks_of_##kind
static Blocks *const blocks_of[] = {NAMED(VALUES), NAMED(SIZES), NAMED(SQUARES), NAMED(NONZEROS),
                                    NAMED(NUMBERS), NAMED(DOUBLES), NAMED(DEVIATIONS), NAMED(DOTS),
                                    NAMED(PRODUCTS)};

/* Add n terms, the first of which has the number `first`, to the lanes; for PRODUCTS also each y to
   those of `also`. */
INLINE void add_terms(int kind, double *lanes, double *also, long first, long n, const void *x,
                      const float *y, double centre) {
#define ADD(lane)                                    \
  {                                                  \
    lanes[lane] += term(kind, x, y, i, centre, 1);   \
    if (kind == PRODUCTS) also[lane] += (double)y[i]; \
  }
  long i = 0;
  for (; i < n && (first + i) % LANES; i++) ADD((first + i) % LANES)
  long blocks = (n - i) / LANES, size = kind == DOUBLES ? sizeof(double) : sizeof(float);
  if (blocks)
    blocks_of[kind](lanes, also, blocks, (const char *)x + i * size, y ? y + i : 0, centre);
  i += blocks * LANES;
  for (int lane = 0; i < n; i++, lane++) ADD(lane)
#undef ADD
}

/* The sum over one contiguous row; for PRODUCTS also that of y. */
INLINE double sum_row(int kind, long n, const void *x, const float *y, double centre,
                      double *also) {
  double lanes[LANES] = {0}, more[LANES] = {0};
  add_terms(kind, lanes, kind == PRODUCTS ? more : 0, 0, n, x, y, centre);
  if (kind == PRODUCTS) *also = sum_of(more);
  return sum_of(lanes);
}

/* The arrays of a sum over columns. */
typedef struct {
  const void *x;
  const float *y;
  const double *centres;                  /* of columns */
  const float *row_centres, *row_scales; /* SCALED: of rows */
} Columns;

/* Add 1 or EACH rows, which are LANES apart, to the sums of one lane; for PRODUCTS and SCALED
   also each y to `also`. */
INLINE void add_rows(int kind, int rows, long row, long width, long stride, Columns in,
                     double *lane, double *also) {
  int has_centres = kind == DEVIATIONS || kind == PRODUCTS, has_also = kind >= PRODUCTS;
  for (long j = 0; j < width; j++) {
    double sum = lane[j], more = has_also ? also[j] : 0;
    _Pragma("GCC unroll 4") for (long of = row; of < row + rows * LANES; of += LANES) {
      long at = of * stride + j;
      double centre = kind == SCALED ? (double)in.row_centres[of] : has_centres ? in.centres[j] : 0;
      sum += term(kind, in.x, in.y, at, centre, kind == SCALED ? (double)in.row_scales[of] : 1);
      if (has_also) more += (double)in.y[at];
    }
    lane[j] = sum;
    if (has_also) also[j] = more;
  }
}

/* The sums over n rows of up to TILE columns; for PRODUCTS and SCALED also those of y. */
INLINE void sum_columns(int kind, long n, long width, long stride, Columns in, double *out,
                        double *also) {
  double lanes[LANES][2][TILE];
  for (int lane = 0; lane < LANES; lane++) {
    memset(lanes[lane][0], 0, width * sizeof(double));
    memset(lanes[lane][1], 0, width * sizeof(double));
  }
  for (long from = 0; from < n; from += LANES * EACH)
    for (int lane = 0; lane < LANES; lane++) {
      double *to = lanes[lane][0], *then = lanes[lane][1];
      if (from + LANES * EACH <= n)
        add_rows(kind, EACH, from + lane, width, stride, in, to, then);
      else
        for (long row = from + lane; row < n; row += LANES)
          add_rows(kind, 1, row, width, stride, in, to, then);
    }
  for (long j = 0; j < width; j++) out[j] = sum_apart(&lanes[0][0][j], 2 * TILE);
  for (long j = 0; kind >= PRODUCTS && j < width; j++)
    also[j] = sum_apart(&lanes[0][1][j], 2 * TILE);
}

/* The sums over channels: up to TILE of them if `length` is 1, else one. Of `batch` examples, those
   of the next lie `step` on. */
INLINE void sum_channels(int kind, long batch, long length, long width, long step, const void *x,
                         const float *y, const double *centres, double *out, double *also) {
  if (length == 1) {
    const Columns in = {.x = x, .y = y, .centres = centres};
    sum_columns(kind, batch, width, step, in, out, also);
    return;
  }
  double lanes[LANES] = {0}, more[LANES] = {0};
  step *= kind == DOUBLES ? sizeof(double) : sizeof(float);
  for (long i = 0; i < batch; i++)
    add_terms(kind, lanes, kind == PRODUCTS ? more : 0, i * length, length,
              (const char *)x + i * step, y ? (const float *)((const char *)y + i * step) : 0,
              centres ? *centres : 0);
  *out = sum_of(lanes);
  if (kind == PRODUCTS) *also = sum_of(more);
}

#endif
