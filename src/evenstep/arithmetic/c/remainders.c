/* Remainders of division, which are exact. */
#include "portable.h"

/* a - b * trunc(a / b): multiples of b are subtracted, the largest first. Each quotient is below 2^28
   and at least 2^-24 away from the integer above it, so binary64 does not round it up, and all other
   numbers are exact. */
static float remainder_of(float a, float b) {
  double rest = a < 0 ? -(double)a : (double)a, by = b < 0 ? -(double)b : (double)b;
  if (!(rest < (double)__builtin_inff()) || !(by > 0)) return __builtin_nanf("");
  while (rest >= by) {
    double multiple = by;
    while (multiple * 0x1p28 <= rest) multiple *= 0x1p28;
    rest -= (double)(int64_t)(rest / multiple) * multiple;
  }
  return float_of(bits_of((float)rest) | (bits_of(a) & 0x80000000u));
}

/* The remainders of a / b, with the sign of a. */
PORTABLE void remainders(long n, const float *a, const float *b, float *out) {
  for (long i = 0; i < n; i++) out[i] = remainder_of(a[i], b[i]);
}
