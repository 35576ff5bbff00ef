/* Random numbers of other laws, made of uniform ones. */
#include "functions.h"

/* Box and Muller: for u in [0, 1), r = sqrt(-2 ln(1 - u[i])) and the angle 2 pi u[half + i] give two
   normal numbers, out[i] = r cos and out[half + i] = r sin. u and out have 2 * half numbers. */
PORTABLE void normals(long half, const float *u, float *out) {
  for (long i = 0; i < half; i++) {
    float r = __builtin_sqrtf(-2.0f * log32(1.0f - u[i]));
    float turns = 4.0f * u[half + i]; /* exact, as is the rest of them to the nearest quarter */
    int32_t quarter = (int32_t)(turns + 0.5f);
    double angle = (double)(turns - (float)quarter) * 0x1.921fb54442d18p+0;
    out[i] = r * cosine_of(angle, (uint64_t)quarter);
    out[half + i] = r * sine_of(angle, (uint64_t)quarter);
  }
}

/* -ln(1 - u), at least 2^-25: exponential numbers, never 0 */
PORTABLE void exponentials(long n, const float *u, float *out) {
  for (long i = 0; i < n; i++) {
    float y = -log32(1.0f - u[i]);
    out[i] = y > 0x1p-25f ? y : 0x1p-25f;
  }
}
