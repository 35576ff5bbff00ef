/* Sums of scaled arrays, rounded once. */
#include "portable.h"

/* out = a + alpha * b */
PORTABLE void add_scaled(long n, const float *a, float alpha, const float *b, float *out) {
  for (long i = 0; i < n; i++) out[i] = fma32(alpha, b[i], a[i]);
}

/* out = a + alpha * (b * c) */
PORTABLE void add_product(long n, const float *a, float alpha, const float *b, const float *c,
                          float *out) {
  for (long i = 0; i < n; i++) out[i] = fma32(alpha * b[i], c[i], a[i]);
}

/* out = a + alpha * (b / c) */
PORTABLE void add_quotient(long n, const float *a, float alpha, const float *b, const float *c,
                           float *out) {
  for (long i = 0; i < n; i++) out[i] = fma32(alpha, b[i] / c[i], a[i]);
}

/* out = a + weight * (b - a), from the nearer end (as torch.lerp) */
PORTABLE void interpolate(long n, const float *a, const float *b, float weight, float *out) {
  if (weight < 0.5f)
    for (long i = 0; i < n; i++) out[i] = fma32(weight, b[i] - a[i], a[i]);
  else
    for (long i = 0; i < n; i++) out[i] = fma32(weight - 1, b[i] - a[i], b[i]);
}
