// SPDX-License-Identifier: Apache-2.0
// Kernels of generation on CPUs; see c_kernels.py. They compute in float32. Each text and each row is computed alone and
// in a fixed order, so its bits do not depend on the others.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef BFLOAT16
typedef uint16_t element;

static inline float widen(element x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline element narrow(float x) {  // rounds to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#else
typedef float element;

static inline float widen(element x) { return x; }
static inline element narrow(float x) { return x; }
#endif

#define INLINE static inline __attribute__((always_inline))
enum { LANES = 16, BLOCK = 16 };

#define ROUND(x) widen(narrow(x))  // as an operator that stores its result

// The text's row in the step, the place of its new token in the caches, and the places of the keys that it sees.
typedef struct { int64_t row, place, first, count; } Text;

typedef struct { const element *query, *key, *value; element *keys, *values, *out; } Tensors;

// Distances of rows of new keys and values, in elements; `heads` query heads share a group's key head.
typedef struct { int64_t key_row, value_row, texts, groups, heads, width; float scale; } Shape;

// exp(x) for x <= 0: 2^n by its bits, and the Taylor series of the rest, at most ln(2) / 2 in size.
static inline float exponential(float x) {
    x = x < -87 ? -87 : x;
    float n = rintf(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float rest = 1 + r * (1 + r * (1.f / 2 + r * (1.f / 6 + r * (1.f / 24 + r * (1.f / 120 + r * (1.f / 720))))));
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return rest * power;
}

static inline void softmax(float *scores, int64_t count) {
    float largest = scores[0], total = 0;
    for (int64_t j = 1; j < count; j++) largest = scores[j] > largest ? scores[j] : largest;
    for (int64_t j = 0; j < count; j++) total += scores[j] = exponential(scores[j] - largest);
    for (int64_t j = 0; j < count; j++) scores[j] /= total;
}

INLINE void widen_rows(const element *from, float *to, int64_t rows, int64_t stride, int64_t width) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t i = 0; i < width; i++) to[j * width + i] = widen(from[j * stride + i]);
}

// Pointers that do not overlap let the compiler keep a query or a sum in registers.
INLINE void score_rows(const float *restrict query, const float *restrict keys, float *restrict scores,
                              int64_t rows, int64_t width) {
    for (int64_t j = 0; j < rows; j++) {
        float score = 0;
        for (int64_t i = 0; i < width; i++) score += query[i] * keys[j * width + i];
        scores[j] = score;
    }
}

INLINE void add_rows(const float *restrict weights, const float *restrict values, float *restrict sums,
                            int64_t rows, int64_t width) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t i = 0; i < width; i++) sums[i] += weights[j] * values[j * width + i];
}

// One group of one text, by blocks of keys. It is inlined, so that loops over a constant width are unrolled.
INLINE void attend_group(
    const element *query, const element *keys, const element *values, element *out, float *scratch, int64_t count,
    int64_t row, int64_t heads, int64_t width, float scale) {
    float *wide_query = scratch, *sums = wide_query + heads * width, *wide = sums + heads * width;
    float *scores = wide + BLOCK * width;
    for (int64_t i = 0; i < heads * width; i++) wide_query[i] = widen(query[i]) * scale, sums[i] = 0;
    for (int64_t j = 0; j < count; j += BLOCK) {
        const int64_t rows = count - j < BLOCK ? count - j : BLOCK;
        widen_rows(keys + j * row, wide, rows, row, width);
        for (int64_t h = 0; h < heads; h++) score_rows(wide_query + h * width, wide, scores + h * count + j, rows, width);
    }
    for (int64_t h = 0; h < heads; h++) softmax(scores + h * count, count);
    for (int64_t j = 0; j < count; j += BLOCK) {
        const int64_t rows = count - j < BLOCK ? count - j : BLOCK;
        widen_rows(values + j * row, wide, rows, row, width);
        for (int64_t h = 0; h < heads; h++) add_rows(scores + h * count + j, wide, sums + h * width, rows, width);
    }
    for (int64_t i = 0; i < heads * width; i++) out[i] = narrow(sums[i]);
}

static int attend_text(const Tensors *all, const Shape *shape, const Text *text, int64_t group) {
    const int64_t width = shape->width, heads = shape->heads, row = shape->groups * width, offset = group * width;
    memcpy(all->keys + text->place * row + offset, all->key + text->row * shape->key_row + offset, width * sizeof(element));
    memcpy(all->values + text->place * row + offset, all->value + text->row * shape->value_row + offset,
           width * sizeof(element));
    float *scratch = malloc(sizeof(float) * (2 * heads * width + BLOCK * width + heads * text->count));
    if (!scratch) return 1;
    const int64_t first_head = (text->row * shape->groups + group) * heads * width;
    const element *query = all->query + first_head;
    const element *keys = all->keys + text->first * row + offset, *values = all->values + text->first * row + offset;
    element *out = all->out + first_head;
#define ATTEND(width) attend_group(query, keys, values, out, scratch, text->count, row, heads, width, shape->scale)
    if (width == 64) ATTEND(64);
    else if (width == 128) ATTEND(128);
    else ATTEND(width);
    free(scratch);
    return 0;
}

// Stores the new keys and values and computes `out`; returns 0, or 1 if memory is short.
int attend(const Tensors *all, const Shape *shape, const Text *texts) {
    int failed = 0;
#pragma omp parallel for reduction(| : failed)
    for (int64_t i = 0; i < shape->texts * shape->groups; i++)
        failed |= attend_text(all, shape, texts + i / shape->groups, i % shape->groups);
    return failed;
}

// x / sqrt(mean(x^2) + eps) * gain
void rms_norm(const element *x, const element *gain, element *out, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows > 64)
    for (int64_t r = 0; r < rows; r++) {
        const element *from = x + r * width;
        element *to = out + r * width;
        float sums[LANES] = {0}, total = 0;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += widen(from[i + lane]) * widen(from[i + lane]);
        for (; i < width; i++) total += widen(from[i]) * widen(from[i]);
        for (int64_t lane = 0; lane < LANES; lane++) total += sums[lane];
        const float scale = 1 / sqrtf(total / width + eps);
        for (i = 0; i < width; i++) to[i] = narrow(widen(from[i]) * scale * widen(gain[i]));
    }
}

// A head of a row. Its pointers do not overlap, which the compiler must know to use vectors.
static void rotate_head(const element *restrict x, const element *restrict cos, const element *restrict sin,
                        element *restrict out, int64_t half) {
    for (int64_t i = 0, j = half; i < half; i++, j++) {
        out[i] = narrow(ROUND(widen(x[i]) * widen(cos[i])) - ROUND(widen(x[j]) * widen(sin[i])));
        out[j] = narrow(ROUND(widen(x[j]) * widen(cos[j])) + ROUND(widen(x[i]) * widen(sin[j])));
    }
}

// x * cos + rotate_half(x) * sin, with products that are rounded as those of PyTorch's operators
void rotate(const element *x, const element *cos, const element *sin, element *out, int64_t rows, int64_t heads,
            int64_t half, int64_t row_stride, int64_t head_stride) {
#pragma omp parallel for if (rows > 64)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++)
            rotate_head(x + r * row_stride + h * head_stride, cos + 2 * r * half, sin + 2 * r * half,
                        out + 2 * (r * heads + h) * half, half);
}

// silu(gate) * up of the two halves of a row
void swiglu(const element *x, element *out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows > 64)
    for (int64_t r = 0; r < rows; r++) {
        const element *gate = x + 2 * r * width, *up = gate + width;
        for (int64_t i = 0; i < width; i++) {
            const float g = widen(gate[i]), e = exponential(g < 0 ? g : -g);
            out[r * width + i] = narrow(ROUND(g * (g < 0 ? e : 1) / (1 + e)) * widen(up[i]));
        }
    }
}
