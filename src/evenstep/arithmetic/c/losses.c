/* Softmax and the negative log-likelihood. Sums are those of sums.h. */
#include "functions.h"
#include "sums.h"

#define CHUNK 4096 /* elements whose exponentials are computed at a time; a multiple of LANES */

/* The largest of n numbers, -inf for none; NaN is passed over. */
INLINE float largest(long n, const float *x) {
  float most[LANES];
  for (int lane = 0; lane < LANES; lane++) most[lane] = -__builtin_inff();
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int lane = 0; lane < LANES; lane++)
      most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
  for (int lane = 0; i < n; i++, lane++) most[lane] = x[i] > most[lane] ? x[i] : most[lane];
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++)
      most[lane] = most[lane + half] > most[lane] ? most[lane + half] : most[lane];
  return most[0];
}

INLINE void exponentials(long n, const float *x, float *out) {
  for (long i = 0; i < n; i++) out[i] = exp32(x[i]);
}

/* The sum of exp(x) over each row; `kept` is null or where the exponentials go. */
INLINE void sum_exponentials(long rows, long n, const float *x, float *kept, float *sums) {
  float memory[CHUNK];
  if (n > CHUNK) { /* then there is one row */
    double lanes[LANES] = {0};
    for (long from = 0; from < n; from += CHUNK) {
      long count = smaller(CHUNK, n - from);
      float *part = kept ? kept + from : memory;
      exponentials(count, x + from, part);
      add_terms(VALUES, lanes, 0, from, count, part, 0, 0);
    }
    sums[0] = (float)sum_of(lanes);
    return;
  }
  float *all = kept ? kept : memory;
  exponentials(rows * n, x, all);
  for (long row = 0; row < rows; row++)
    sums[row] = (float)sum_row(VALUES, n, all + row * n, 0, 0, 0);
}

/* For each row, m its largest element: out = exp(x - m) / sum of exp(x - m), or, if `log`,
   (x - m) - log(sum of exp(x - m)). */
INLINE void softmax_rows(long log, long rows, long n, const float *x, float *out) {
  float sums[CHUNK];
  for (long from = 0, block = larger(1, CHUNK / larger(1, n)); from < rows; from += block) {
    long count = smaller(block, rows - from);
    const float *in = x + from * n;
    float *to = out + from * n;
    for (long row = 0; row < count; row++) {
      float most = largest(n, in + row * n);
      for (long i = row * n; i < (row + 1) * n; i++) to[i] = in[i] - most;
    }
    sum_exponentials(count, n, to, log ? 0 : to, sums);
    for (long row = 0; log && row < count; row++) sums[row] = log32(sums[row]);
    for (long row = 0; row < count; row++)
      for (long i = row * n; i < (row + 1) * n; i++)
        to[i] = log ? to[i] - sums[row] : to[i] / sums[row];
  }
}

INLINE float softmax_slope(long log, float g, float y, float sum) {
  return log ? g - exp32(y) * sum : (g - sum) * y;
}

/* For each row of outputs y and gradients g: out = (g - sum of g * y) * y, or, if `log`,
   g - exp(y) * sum of g. */
INLINE void softmax_gradient_rows(long log, long rows, long n, const float *g, const float *y,
                                  float *out) {
  for (long row = 0; row < rows; row++, g += n, y += n, out += n) {
    float sum = (float)(log ? sum_row(VALUES, n, g, 0, 0, 0) : sum_row(DOTS, n, y, g, 0, 0));
    for (long i = 0; i < n; i++) out[i] = softmax_slope(log, g[i], y[i], sum);
  }
}

/* The same of up to TILE columns. */
INLINE void softmax_columns(long log, long n, long width, long stride, const float *x, float *out) {
  float most[TILE], sums[TILE];
  double lanes[LANES][TILE] = {0};
  for (long j = 0; j < width; j++) most[j] = -__builtin_inff();
  for (long i = 0; i < n * stride; i += stride)
    for (long j = 0; j < width; j++) most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
  for (long i = 0; i < n; i++)
    for (long j = 0; j < width; j++) {
      float value = x[i * stride + j] - most[j], power = exp32(value);
      out[i * stride + j] = log ? value : power;
      lanes[i % LANES][j] += (double)power;
    }
  for (long j = 0; j < width; j++) {
    float sum = (float)sum_apart(&lanes[0][j], TILE);
    sums[j] = log ? log32(sum) : sum;
  }
  for (long i = 0; i < n * stride; i += stride)
    for (long j = 0; j < width; j++)
      out[i + j] = log ? out[i + j] - sums[j] : out[i + j] / sums[j];
}

INLINE void softmax_gradient_columns(long log, long n, long width, long stride, const float *g,
                                     const float *y, float *out) {
  const Columns in = {.x = g, .y = y};
  double sums[TILE];
  sum_columns(log ? VALUES : DOTS, n, width, stride, in, sums, 0);
  for (long i = 0; i < n * stride; i += stride)
    for (long j = 0; j < width; j++)
      out[i + j] = softmax_slope(log, g[i + j], y[i + j], (float)sums[j]);
}

/* Call a function with a constant for `log`, so that loops of its own are compiled for each. */
#define BY_LOG(function, ...) (log ? function(1, __VA_ARGS__) : function(0, __VA_ARGS__))

/* Softmax over the middle dimension of an array of outer * n * inner elements. */
PORTABLE void softmax(long log, long outer, long n, long inner, const float *x, float *out) {
  if (inner == 1) return BY_LOG(softmax_rows, outer, n, x, out);
  for (long block = 0; block < outer * n * inner; block += n * inner)
    for (long at = block; at < block + inner; at += TILE)
      BY_LOG(softmax_columns, n, smaller(TILE, block + inner - at), inner, x + at, out + at);
}

PORTABLE void softmax_gradient(long log, long outer, long n, long inner, const float *g,
                               const float *y, float *out) {
  if (inner == 1) return BY_LOG(softmax_gradient_rows, outer, n, g, y, out);
  for (long block = 0; block < outer * n * inner; block += n * inner)
    for (long at = block; at < block + inner; at += TILE)
      BY_LOG(softmax_gradient_columns, n, smaller(TILE, block + inner - at), inner, g + at, y + at,
             out + at);
}

/* out = log(sum of exp(x - m)) + m for each row, m its largest element, or 0 if that is infinite.
   `scratch` has room for n. */
PORTABLE void log_sum_exp(long rows, long n, const float *x, float *out, float *scratch) {
  for (long row = 0; row < rows; row++, x += n) {
    float most = largest(n, x), sum;
    most = __builtin_isinf(most) ? 0.0f : most;
    for (long i = 0; i < n; i++) scratch[i] = x[i] - most;
    sum_exponentials(1, n, scratch, scratch, &sum);
    out[row] = log32(sum) + most;
  }
}

enum { NONE, MEAN, SUM };

/* The first target that is neither a class nor ignored; `ignored` if there is none. */
INLINE long wrong_target(long n, long classes, const int64_t *target, long ignored) {
  for (long i = 0; i < n; i++)
    if (target[i] != ignored && (target[i] < 0 || target[i] >= classes)) return target[i];
  return ignored;
}

/* The negative log-likelihood of `batch * inner` examples: of each, -weight[t] * x[t], t its target.
   `total` is the sum of the weights of targets that aren't ignored. NONE: `out` has one number for
   each example; SUM: it is their sum; MEAN: that, divided by the total, in double.
   `wrong` is as `wrong_target` says. */
PORTABLE void likelihood(long batch, long classes, long inner, const float *x,
                         const int64_t *target, const float *weight, long ignored, long reduction,
                         float *out, float *total, long *wrong) {
  double sums[LANES] = {0}, weights[LANES] = {0};
  *wrong = wrong_target(batch * inner, classes, target, ignored);
  for (long i = 0; i < batch * inner && *wrong == ignored; i++) {
    long class = target[i];
    if (reduction == NONE) out[i] = 0;
    if (class == ignored) continue;
    float own = weight ? weight[class] : 1.0f;
    float value = x[(i / inner * classes + class) * inner + i % inner];
    if (reduction == NONE) out[i] = -own * value;
    sums[i % LANES] -= (double)own * (double)value;
    weights[i % LANES] += (double)own;
  }
  double sum = sum_of(sums), all = sum_of(weights);
  *total = reduction == NONE ? 0.0f : (float)all;
  if (reduction != NONE) *out = (float)(reduction == MEAN ? sum / all : sum);
}

/* Its gradient: out = -weight[t] * g at each target t, 0 elsewhere. NONE: g is that of the example;
   MEAN: g is divided by the total first. `wrong` is as above. */
PORTABLE void likelihood_gradient(long batch, long classes, long inner, const float *g,
                                  const int64_t *target, const float *weight, long ignored,
                                  long reduction, const float *total, float *out, long *wrong) {
  memset(out, 0, batch * classes * inner * sizeof(float));
  float shared = reduction == MEAN ? *g / *total : reduction == SUM ? *g : 0;
  *wrong = wrong_target(batch * inner, classes, target, ignored);
  for (long i = 0; i < batch * inner && *wrong == ignored; i++) {
    long class = target[i];
    if (class == ignored) continue;
    float own = weight ? weight[class] : 1.0f;
    out[(i / inner * classes + class) * inner + i % inner] =
        -own * (reduction == NONE ? g[i] : shared);
  }
}
