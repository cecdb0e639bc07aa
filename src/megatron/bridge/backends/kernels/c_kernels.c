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
enum { LANES = 16, BLOCK = 16, ROWS = 8, FEW = 2, TILE = 64, TOKENS = 32, SCORES = 1 << 22, DEPTH = 256 };

#define ROUND(x) widen(narrow(x))  // as an operator that stores its result
#define UP(count, multiple) (((count) + (multiple) - 1) / (multiple) * (multiple))

// Floats of a register, and rows of LANES sums that fit into the registers with their factors: a divisor of ROWS, and the
// most. A longer vector type would live in memory.
#if defined(__AVX512F__)
enum { NATIVE = 16, AT_ONCE = 8, MOST_AT_ONCE = 8 };
#elif defined(__AVX__)
enum { NATIVE = 8, AT_ONCE = 4, MOST_AT_ONCE = 6 };
#else
enum { NATIVE = 4, AT_ONCE = 4, MOST_AT_ONCE = 6 };
#endif
enum { PARTS = LANES / NATIVE };

typedef float Native __attribute__((vector_size(NATIVE * sizeof(float)), aligned(sizeof(float)), may_alias));

// The row of a new token in the step, its place in the caches, and the places of the keys that it sees.
typedef struct { int64_t row, place, first, count; } Token;

typedef struct { const element *query, *key, *value; element *keys, *values, *out; } Tensors;

// Distances of rows of new keys and values, in elements; `heads` query heads share a group's key head.
typedef struct { int64_t key_row, value_row, tokens, texts, groups, heads, width; float scale; } Shape;

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

static inline float largest_of(const float *x, int64_t count) {  // by lanes, which the compiler does not do by itself
    float lanes[LANES], largest = x[0];
    int64_t j = 0;
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = largest;
    for (; j + LANES <= count; j += LANES)
        for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = x[j + lane] > lanes[lane] ? x[j + lane] : lanes[lane];
    for (; j < count; j++) largest = x[j] > largest ? x[j] : largest;
    for (int64_t lane = 0; lane < LANES; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    return largest;
}

static inline void softmax(float *scores, int64_t count) {
    const float largest = largest_of(scores, count);
    float total = 0;
    for (int64_t j = 0; j < count; j++) total += scores[j] = exponential(scores[j] - largest);
    const float factor = 1 / total;
    for (int64_t j = 0; j < count; j++) scores[j] *= factor;
}

INLINE void widen_rows(const element *from, float *to, int64_t rows, int64_t stride, int64_t width, int64_t to_row) {
    for (int64_t j = 0; j < rows; j++)
        for (int64_t i = 0; i < width; i++) to[j * to_row + i] = widen(from[j * stride + i]);
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

// Calls a function with a usual width as a constant, for which the compiler unrolls its loops.
#define BY_WIDTH(function, ...) \
    (width == 64 ? function(__VA_ARGS__, 64) : width == 128 ? function(__VA_ARGS__, 128) : function(__VA_ARGS__, width))

// One group of one token, by blocks of keys.
INLINE void attend_group(
    const element *query, const element *keys, const element *values, element *out, float *scratch, int64_t count,
    int64_t row, int64_t heads, float scale, int64_t width) {
    float *wide_query = scratch, *sums = wide_query + heads * width, *wide = sums + heads * width;
    float *scores = wide + BLOCK * width;
    for (int64_t i = 0; i < heads * width; i++) wide_query[i] = widen(query[i]) * scale, sums[i] = 0;
    for (int64_t j = 0; j < count; j += BLOCK) {
        const int64_t rows = count - j < BLOCK ? count - j : BLOCK;
        widen_rows(keys + j * row, wide, rows, row, width, width);
        for (int64_t h = 0; h < heads; h++) score_rows(wide_query + h * width, wide, scores + h * count + j, rows, width);
    }
    for (int64_t h = 0; h < heads; h++) softmax(scores + h * count, count);
    for (int64_t j = 0; j < count; j += BLOCK) {
        const int64_t rows = count - j < BLOCK ? count - j : BLOCK;
        widen_rows(values + j * row, wide, rows, row, width, width);
        for (int64_t h = 0; h < heads; h++) add_rows(scores + h * count + j, wide, sums + h * width, rows, width);
    }
    for (int64_t i = 0; i < heads * width; i++) out[i] = narrow(sums[i]);
}

static int attend_token(const Tensors *all, const Shape *shape, const Token *token, int64_t group) {
    const int64_t width = shape->width, heads = shape->heads, row = shape->groups * width, offset = group * width;
    float *scratch = malloc(sizeof(float) * (2 * heads * width + BLOCK * width + heads * token->count));
    if (!scratch) return 1;
    const int64_t first_head = (token->row * shape->groups + group) * heads * width;
    const element *query = all->query + first_head;
    const element *keys = all->keys + token->first * row + offset, *values = all->values + token->first * row + offset;
    element *out = all->out + first_head;
    BY_WIDTH(attend_group, query, keys, values, out, scratch, token->count, row, heads, shape->scale);
    free(scratch);
    return 0;
}

// Adds left [count, depth] times right [depth, LANES] to `sums`, which stay in registers meanwhile.
INLINE void multiply_rows(const float *left, int64_t left_row, const float *right, int64_t right_row, int64_t depth,
                          float *sums, int64_t sums_row, int64_t count) {
    Native total[MOST_AT_ONCE][PARTS], factors[PARTS];
    for (int64_t r = 0; r < count; r++)
        for (int64_t part = 0; part < PARTS; part++) total[r][part] = *(const Native *)(sums + r * sums_row + part * NATIVE);
    for (int64_t k = 0; k < depth; k++) {
        for (int64_t part = 0; part < PARTS; part++) factors[part] = *(const Native *)(right + k * right_row + part * NATIVE);
        for (int64_t r = 0; r < count; r++)
            for (int64_t part = 0; part < PARTS; part++) total[r][part] += left[r * left_row + k] * factors[part];
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t part = 0; part < PARTS; part++) *(Native *)(sums + r * sums_row + part * NATIVE) = total[r][part];
}

// Adds left [ROWS, depth] times right [depth, LANES] to `sums`.
INLINE void multiply(const float *left, int64_t left_row, const float *right, int64_t right_row, int64_t depth,
                     float *sums, int64_t sums_row) {
    for (int64_t r = 0; r < ROWS; r += AT_ONCE)
        multiply_rows(left + r * left_row, left_row, right, right_row, depth, sums + r * sums_row, sums_row, AT_ONCE);
}

// The matrices of a block of tokens: a row for each of their query heads, and the keys or values of a tile.
typedef struct { float *queries, *scores, *sums, *tile; int64_t rows, columns, wide; } Block;

INLINE void score_block(const Block *it, const element *keys, int64_t row, int64_t count, int64_t width) {
    for (int64_t j = 0; j < it->columns; j += LANES) {
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t i = 0; i < width; i++)
                it->tile[i * LANES + lane] = j + lane < count ? widen(keys[(j + lane) * row + i]) : 0;
        for (int64_t r = 0; r < it->rows; r += ROWS)
            multiply(it->queries + r * width, width, it->tile, LANES, width, it->scores + r * it->columns + j, it->columns);
    }
}

INLINE void add_block(const Block *it, const element *values, int64_t row, int64_t count, int64_t width) {
    for (int64_t j = 0; j < count; j += TILE) {
        const int64_t depth = count - j < TILE ? count - j : TILE;
        widen_rows(values + j * row, it->tile, depth, row, width, it->wide);
        for (int64_t r = 0; r < it->rows; r += ROWS)
            for (int64_t c = 0; c < it->wide; c += LANES)
                multiply(it->scores + r * it->columns + j, it->columns, it->tile + c, it->wide, depth,
                         it->sums + r * it->wide + c, it->wide);
    }
}

// The head that row `r` of a block belongs to.
static inline int64_t head_of(const Shape *shape, const Token *tokens, int64_t r, int64_t group) {
    return (tokens[r / shape->heads].row * shape->groups + group) * shape->heads + r % shape->heads;
}

static inline int64_t keys_of(const Token *tokens, int64_t count) {  // from the first token's first to the last one's last
    return tokens[count - 1].first + tokens[count - 1].count - tokens[0].first;
}

// Replaces the scores by weights: zeros for keys that a token does not see.
static void weigh_block(const Block *it, const Shape *shape, const Token *tokens, int64_t count) {
    for (int64_t r = 0; r < count * shape->heads; r++) {
        float *scores = it->scores + r * it->columns;
        const Token *token = tokens + r / shape->heads;
        const int64_t first = token->first - tokens[0].first, end = first + token->count;
        softmax(scores + first, token->count);
        memset(scores, 0, first * sizeof(float));
        memset(scores + end, 0, (it->columns - end) * sizeof(float));
    }
}

// Several new tokens of one text, which see mostly the same keys.
static int attend_block(const Tensors *all, const Shape *shape, const Token *tokens, int64_t count, int64_t group) {
    const int64_t width = shape->width, row = shape->groups * width, seen = keys_of(tokens, count);
    const int64_t used = count * shape->heads, first = tokens[0].first * row + group * width;
    Block it = {.rows = UP(used, ROWS), .columns = UP(seen, LANES), .wide = UP(width, LANES)};
    float *scratch = calloc(it.rows * (width + it.columns + it.wide) + TILE * it.wide, sizeof(float));
    if (!scratch) return 1;
    it.queries = scratch, it.scores = it.queries + it.rows * width, it.sums = it.scores + it.rows * it.columns;
    it.tile = it.sums + it.rows * it.wide;
    for (int64_t r = 0; r < used; r++) {
        const element *query = all->query + head_of(shape, tokens, r, group) * width;
        for (int64_t i = 0; i < width; i++) it.queries[r * width + i] = widen(query[i]) * shape->scale;
    }
    BY_WIDTH(score_block, &it, all->keys + first, row, seen);
    weigh_block(&it, shape, tokens, count);
    BY_WIDTH(add_block, &it, all->values + first, row, seen);
    for (int64_t r = 0; r < used; r++) {
        element *out = all->out + head_of(shape, tokens, r, group) * width;
        for (int64_t i = 0; i < width; i++) out[i] = narrow(it.sums[r * it.wide + i]);
    }
    free(scratch);
    return 0;
}

// The tokens of a text that are computed together: as many as the memory for their scores allows.
static int64_t block_size(const Shape *shape, const Token *tokens, int64_t count) {
    const int64_t most = count < TOKENS ? count : TOKENS, fit = SCORES / (shape->heads * keys_of(tokens, most));
    return fit < 1 ? 1 : fit < most ? fit : most;
}

static int attend_blocks(const Tensors *all, const Shape *shape, const Token *tokens, const int64_t *begins, int64_t blocks) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(| : failed)
    for (int64_t i = 0; i < blocks * shape->groups; i++) {
        const int64_t group = i % shape->groups, *begin = begins + i / shape->groups, count = begin[1] - begin[0];
        failed |= count == 1 ? attend_token(all, shape, tokens + begin[0], group)
                             : attend_block(all, shape, tokens + begin[0], count, group);
    }
    return failed;
}

// Stores the new keys and values and computes `out`; returns 0, or 1 if memory is short. The tokens from `starts[i]` up
// to `starts[i + 1]` follow each other in one text.
int attend(const Tensors *all, const Shape *shape, const Token *tokens, const int64_t *starts) {
    const int64_t row = shape->groups * shape->width, size = row * sizeof(element);
#pragma omp parallel for if (shape->tokens > 64)
    for (int64_t i = 0; i < shape->tokens; i++) {
        memcpy(all->keys + tokens[i].place * row, all->key + tokens[i].row * shape->key_row, size);
        memcpy(all->values + tokens[i].place * row, all->value + tokens[i].row * shape->value_row, size);
    }
    int64_t blocks = 0, *begins = malloc((shape->tokens + 1) * sizeof *begins);
    if (!begins) return 1;
    for (int64_t text = 0; text < shape->texts; text++)
        for (int64_t i = starts[text]; i < starts[text + 1]; i += block_size(shape, tokens + i, starts[text + 1] - i))
            begins[blocks++] = i;
    begins[blocks] = shape->tokens;
    const int failed = attend_blocks(all, shape, tokens, begins, blocks);
    free(begins);
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

// The weights [depth, LANES] of a panel in float32; `tile` has room for those that must be widened.
INLINE const float *widen_panel(const element *panel, int64_t depth, float *tile) {
#ifdef BFLOAT16
    for (int64_t i = 0; i < depth * LANES; i++) tile[i] = widen(panel[i]);
    return tile;
#else
    return panel;
#endif
}

// Writes the rows' products with LANES features, whose weights are `panel` [width, LANES]. Each sum goes through the
// inputs in order, so that it does not depend on the number of rows. `x` and `sums` have room for UP(rows, ROWS) rows.
static void multiply_panel(const float *x, const element *panel, float *sums, int64_t rows, int64_t width) {
    float tile[DEPTH * LANES];
    memset(sums, 0, UP(rows, ROWS) * LANES * sizeof(float));
    for (int64_t k = 0; k < width; k += DEPTH) {
        const int64_t depth = width - k < DEPTH ? width - k : DEPTH;
        const float *weights = widen_panel(panel + k * LANES, depth, tile);
        int64_t r = 0;
        for (; rows - r > ROWS; r += MOST_AT_ONCE)
            multiply_rows(x + r * width + k, width, weights, LANES, depth, sums + r * LANES, LANES, MOST_AT_ONCE);
        for (; rows - r > 2; r += AT_ONCE)
            multiply_rows(x + r * width + k, width, weights, LANES, depth, sums + r * LANES, LANES, AT_ONCE);
        for (; r < rows; r += 2)
            multiply_rows(x + r * width + k, width, weights, LANES, depth, sums + r * LANES, LANES, 2);
    }
}

typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float)), aligned(sizeof(float)), may_alias));

// LANES weights in float32: bf16 as those at even and those at odd places, which takes two operations.
INLINE void load_lanes(const element *from, Half lanes[2]) {
#ifdef BFLOAT16
    typedef uint32_t Words __attribute__((vector_size(sizeof(Half)), aligned(sizeof(element)), may_alias));
    const Words words = *(const Words *)from;
    lanes[0] = (Half)(words << 16);
    lanes[1] = (Half)(words & 0xffff0000u);
#else
    lanes[0] = *(const Half *)from;
    lanes[1] = *(const Half *)(from + LANES / 2);
#endif
}

INLINE void store_lanes(const Half lanes[2], float *to) {  // in the order of the weights
#ifdef BFLOAT16
    for (int64_t i = 0; i < LANES; i++) to[i] = lanes[i % 2][i / 2];
#else
    *(Half *)to = lanes[0];
    *(Half *)(to + LANES / 2) = lanes[1];
#endif
}

// As multiply_panel for FEW rows and two panels, without a tile: while the weights of few rows come from memory, the sums
// of one panel would wait for each other.
static void multiply_two_panels(const float *x, const element *first, const element *second, float *first_sums,
                                float *second_sums, int64_t width) {
    Half total[FEW][2][2] = {0};
    for (int64_t k = 0; k < width; k++) {
        Half factors[2][2];
        load_lanes(first + k * LANES, factors[0]);
        load_lanes(second + k * LANES, factors[1]);
        for (int64_t r = 0; r < FEW; r++)
            for (int64_t panel = 0; panel < 2; panel++)
                for (int64_t half = 0; half < 2; half++) total[r][panel][half] += x[r * width + k] * factors[panel][half];
    }
    for (int64_t r = 0; r < FEW; r++) {
        store_lanes(total[r][0], first_sums + r * LANES);
        store_lanes(total[r][1], second_sums + r * LANES);
    }
}

// Widens the rows of x that differ from the row before them, one after the other, and writes the place of each row among
// them. Padding repeats a row: what is computed for one is copied. Returns the number of different rows.
static int64_t widen_different_rows(const element *x, float *wide, int64_t *places, int64_t rows, int64_t width) {
    int64_t different = 0;
    for (int64_t r = 0; r < rows; r++) {
        const element *row = x + r * width;
        if (r == 0 || memcmp(row, row - width, width * sizeof(element)))
            widen_rows(row, wide + different++ * width, 1, width, width, width);
        places[r] = different - 1;
    }
    return different;
}

// Writes LANES features of `out` from `first` on, rounded, where `places` says which row of the sums is a row's.
static void store_panel(const float *sums, const int64_t *places, const element *bias, element *out, int64_t rows,
                        int64_t first, int64_t features) {
    const int64_t count = features - first < LANES ? features - first : LANES;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++)
            out[r * features + first + i] = narrow(sums[places[r] * LANES + i] + (bias ? widen(bias[first + i]) : 0));
}

// out [rows, features] = x [rows, width] times the panels' weights, plus a bias if there is one. `panels` are
// [UP(features, LANES) / LANES, width, LANES]. Returns 0, or 1 if memory is short.
int multiply_panels(const element *x, const element *panels, const element *bias, element *out, int64_t rows,
                    int64_t width, int64_t features) {
    const int64_t padded = UP(rows, ROWS);
    int failed = 0;
    float *wide = calloc(padded * width, sizeof(float));
    int64_t *places = malloc(rows * sizeof *places);
    if (!wide || !places) {
        free(wide);
        free(places);
        return 1;
    }
    const int64_t different = widen_different_rows(x, wide, places, rows, width);
    const int64_t panel = LANES * width, count = UP(features, LANES) / LANES;
#pragma omp parallel reduction(| : failed) if (features > LANES)
    {
        float *sums = malloc(2 * padded * LANES * sizeof(float));
        failed |= !sums;
#pragma omp for
        for (int64_t pair = 0; pair < count; pair += 2) {
            if (!sums) continue;
            const int64_t both = pair + 1 < count;
            float *second_sums = sums + padded * LANES;
            if (different <= FEW && both)
                multiply_two_panels(wide, panels + pair * panel, panels + (pair + 1) * panel, sums, second_sums, width);
            else
                for (int64_t i = 0; i <= both; i++)
                    multiply_panel(wide, panels + (pair + i) * panel, sums + i * padded * LANES, different, width);
            for (int64_t i = 0; i <= both; i++)
                store_panel(sums + i * padded * LANES, places, bias, out, rows, (pair + i) * LANES, features);
        }
        free(sums);
    }
    free(places);
    free(wide);
    return failed;
}
