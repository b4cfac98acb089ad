/* Kernels on a CPU: one layer of a decode step over blocks (write the new tokens, attend, merge), copies of blocks, and
 * a checksum over any memory.
 *
 * A decode step is cut into tasks. A task is a span of adjacent slots ("runs") and the rows that attend to it: several where they
 * share its blocks, so that a shared block is read once for all of them. A task and a kv head are worked on by one thread,
 * tile by tile, T tokens a tile, with the running maximum and sum of FlashAttention (Dao et al. 2022):
 *
 *     scores  [queries, T]    = q [queries, key_dim] x K tile, transposed into [key_dim, T]
 *     acc     [queries, value_dim] += exp2(scores - maximum) x V tile
 *
 * queries = rows of the task x heads of a group, so that grouped-query attention reads keys and values once. What the tasks
 * of a row give is merged by log-sum-exp ("partials"). All sums are in float32; maxima are in units of log2.
 *
 * Store: keys [kv_heads, num_slots, key_dim], values [kv_heads, num_slots, value_dim].
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX__)
#define W 8
#else
#define W 4
#endif
#define TV 4       /* vectors a tile */
#define T (TV * W) /* tokens a tile */
#define QUERIES 3  /* queries whose scores are held in registers at a time */

#define INLINE static inline __attribute__((always_inline))
#define LOG2E 1.4426950408889634f

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* What is alike for all layers of a step. `library.py` has the same fields in the same order. */
typedef struct {
    int64_t num_rows, kv_heads, group, key_dim, value_dim, num_slots;
    int64_t store_dtype, query_dtype; /* FLOAT32 or BFLOAT16; new tokens have the query's */
    int64_t num_tasks, num_threads, scratch_floats;
    const int64_t *tasks;     /* [num_tasks, 6]: first and end in task_rows, first and end in runs, first partial,
                                 position of the first token */
    const int64_t *task_rows; /* row of each query block of a task */
    const int64_t *runs;      /* [·, 2]: first slot, tokens */
    const int64_t *row_ends;  /* [num_rows + 1]: where a row's partials begin and end in row_partials */
    const int64_t *row_partials;
    const int64_t *targets; /* [num_rows]: slot of each row's new token, -1: none */
    const int64_t *lengths; /* [num_rows]: tokens of each row */
    float *scratch;         /* [num_threads, scratch_floats] */
    float *partials;        /* [num_partials, kv_heads, group, padded value_dim] */
    float *maxima;          /* [num_partials, kv_heads, group, 2]: maximum, sum */
    float scale;
} Step;

INLINE int64_t padded(int64_t dim) { return (dim + W - 1) / W * W; }

INLINE float from_bfloat16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to nearest, ties to even */
}

INLINE float get(const void *data, int64_t index, int64_t dtype) {
    return dtype == FLOAT32 ? ((const float *)data)[index] : from_bfloat16(((const uint16_t *)data)[index]);
}

INLINE void put(void *data, int64_t index, int64_t dtype, float value) {
    if (dtype == FLOAT32)
        ((float *)data)[index] = value;
    else
        ((uint16_t *)data)[index] = to_bfloat16(value);
}

/* The larger of each pair; where one is NaN, b. */
INLINE vec larger(vec a, vec b) {
    ivec is_a = a > b;
    return (vec)((is_a & (ivec)a) | (~is_a & (ivec)b));
}

/* 2 to the power of x, for x <= 0; below -126 as at -126. NaN stays NaN. Error below 2 units in the last place. */
INLINE vec exp2_vec(vec x) {
    x = larger((vec){0} - 126.0f, x);
    ivec whole = __builtin_convertvector(x - 0.5f, ivec); /* truncates, so for x <= 0: to nearest */
    vec part = x - __builtin_convertvector(whole, vec);   /* -0.5 .. 0.5 */
    vec y = part * 1.5403530e-4f + 1.3333558e-3f;
    y = y * part + 9.6181291e-3f;
    y = y * part + 5.5504109e-2f;
    y = y * part + 2.4022651e-1f;
    y = y * part + 6.9314718e-1f;
    y = y * part + 1.0f;
    return (vec)((ivec)y + (whole << 23));
}

/* The next tile's keys and values, fetched a cache line at a time while this one is computed. A burst of fetches would wait
 * for memory, and memory for the next burst. */
typedef struct {
    const char *at, *end, *then, *then_end;
} Ahead;

INLINE void look_ahead(Ahead *ahead) {
    if (ahead->at >= ahead->end) {
        ahead->at = ahead->then, ahead->end = ahead->then_end;
        ahead->then = ahead->then_end;
        return;
    }
    __builtin_prefetch(ahead->at, 0, 3);
    ahead->at += 64;
}

INLINE Ahead plan_ahead(const char *keys, int64_t key_bytes, const char *values, int64_t value_bytes, const int64_t *slots,
                        int64_t tokens) {
    Ahead ahead = {0, 0, 0, 0};
    if (tokens && slots[tokens - 1] - slots[0] == tokens - 1) { /* scattered tokens are left to the processor */
        ahead.at = keys + slots[0] * key_bytes, ahead.end = ahead.at + tokens * key_bytes;
        ahead.then = values + slots[0] * value_bytes, ahead.then_end = ahead.then + tokens * value_bytes;
    }
    return ahead;
}

/* keys of T tokens, [T] pointers to [dim] -> transposed [dim, T] */
INLINE void transpose(const float *const *rows, int64_t dim, float *out, Ahead *ahead) {
    int64_t d = 0;
#if defined(__AVX__)
    for (int64_t t = 0; t < T; t += 8)
        for (d = 0; d + 8 <= dim; d += 8) {
            for (int i = 0; i < 3; i++)
                look_ahead(ahead);
            __m256 r0 = _mm256_loadu_ps(rows[t] + d), r1 = _mm256_loadu_ps(rows[t + 1] + d);
            __m256 r2 = _mm256_loadu_ps(rows[t + 2] + d), r3 = _mm256_loadu_ps(rows[t + 3] + d);
            __m256 r4 = _mm256_loadu_ps(rows[t + 4] + d), r5 = _mm256_loadu_ps(rows[t + 5] + d);
            __m256 r6 = _mm256_loadu_ps(rows[t + 6] + d), r7 = _mm256_loadu_ps(rows[t + 7] + d);
            __m256 a0 = _mm256_unpacklo_ps(r0, r1), a1 = _mm256_unpackhi_ps(r0, r1);
            __m256 a2 = _mm256_unpacklo_ps(r2, r3), a3 = _mm256_unpackhi_ps(r2, r3);
            __m256 a4 = _mm256_unpacklo_ps(r4, r5), a5 = _mm256_unpackhi_ps(r4, r5);
            __m256 a6 = _mm256_unpacklo_ps(r6, r7), a7 = _mm256_unpackhi_ps(r6, r7);
            __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
            __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
            __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
            __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
            float *to = out + d * T + t;
            _mm256_storeu_ps(to, _mm256_permute2f128_ps(b0, b4, 0x20));
            _mm256_storeu_ps(to + T, _mm256_permute2f128_ps(b1, b5, 0x20));
            _mm256_storeu_ps(to + 2 * T, _mm256_permute2f128_ps(b2, b6, 0x20));
            _mm256_storeu_ps(to + 3 * T, _mm256_permute2f128_ps(b3, b7, 0x20));
            _mm256_storeu_ps(to + 4 * T, _mm256_permute2f128_ps(b0, b4, 0x31));
            _mm256_storeu_ps(to + 5 * T, _mm256_permute2f128_ps(b1, b5, 0x31));
            _mm256_storeu_ps(to + 6 * T, _mm256_permute2f128_ps(b2, b6, 0x31));
            _mm256_storeu_ps(to + 7 * T, _mm256_permute2f128_ps(b3, b7, 0x31));
        }
#endif
    for (; d < dim; d++)
        for (int64_t t = 0; t < T; t++)
            out[d * T + t] = rows[t][d];
}

/* scores [count, T] = q [count, dim] x keys [dim, T] */
INLINE void score_block(const int count, const float *q, int64_t dim, const float *keys, float *scores,
                        Ahead *ahead) {
    vec sum[QUERIES][TV];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < TV; j++)
            sum[m][j] = (vec){0};
    for (int64_t d = 0; d < dim; d++) {
        look_ahead(ahead);
        for (int j = 0; j < TV; j++) {
            vec k = *(const vec *)(keys + d * T + j * W);
            for (int m = 0; m < count; m++)
                sum[m][j] += k * q[m * dim + d];
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < TV; j++)
            *(vec *)(scores + m * T + j * W) = sum[m][j];
}

/* acc [count, vectors * W] += weights [count, tokens] x values, [tokens] pointers; `dim`: floats between rows of acc */
INLINE void value_block(const int count, const int vectors, const float *weights, const float *const *values,
                        int64_t offset, int64_t tokens, int64_t dim, float *acc, Ahead *ahead) {
    vec sum[QUERIES][4];
    for (int m = 0; m < count; m++)
        for (int j = 0; j < vectors; j++)
            sum[m][j] = *(const vec *)(acc + m * dim + offset + j * W);
    for (int64_t t = 0; t < tokens; t++) {
        look_ahead(ahead), look_ahead(ahead);
        for (int j = 0; j < vectors; j++) {
            vec v = *(const vec *)(values[t] + offset + j * W);
            for (int m = 0; m < count; m++)
                sum[m][j] += v * weights[m * T + t];
        }
    }
    for (int m = 0; m < count; m++)
        for (int j = 0; j < vectors; j++)
            *(vec *)(acc + m * dim + offset + j * W) = sum[m][j];
}

INLINE void value_rows(const int count, const float *weights, const float *const *values, int64_t tokens, int64_t dim,
                       float *acc, Ahead *ahead) {
    int64_t offset = 0;
    for (; offset + 4 * W <= dim; offset += 4 * W)
        value_block(count, 4, weights, values, offset, tokens, dim, acc, ahead);
    switch ((dim - offset) / W) {
    case 3: value_block(count, 3, weights, values, offset, tokens, dim, acc, ahead); break;
    case 2: value_block(count, 2, weights, values, offset, tokens, dim, acc, ahead); break;
    case 1: value_block(count, 1, weights, values, offset, tokens, dim, acc, ahead); break;
    }
}

/* How many of `left` queries to take together, so that none is left alone. */
INLINE int64_t together(int64_t left) { return left == 4 ? 2 : left < QUERIES ? left : QUERIES; }

/* Turns scores into weights, raises maximum and sum, and shrinks what was summed under a lower maximum. */
INLINE void softmax_tile(float *scores, int64_t tokens, float *maximum, float *sum, float *acc, int64_t dim) {
    vec highest = *(vec *)scores;
    if (tokens < T) {
        for (int64_t t = tokens; t < T; t++)
            scores[t] = -INFINITY;
        highest = *(vec *)scores;
    }
    for (int j = 1; j < TV; j++) {
        vec other = *(vec *)(scores + j * W);
        highest = larger(highest, other);
    }
    float top = *maximum;
    for (int i = 0; i < W; i++)
        top = highest[i] > top ? highest[i] : top;
    if (top > *maximum) {
        float factor = exp2f(*maximum - top); /* 0 at the first tile */
        *sum *= factor;
        for (int64_t d = 0; d < dim; d += W)
            *(vec *)(acc + d) *= factor;
        *maximum = top;
    }
    vec total = (vec){0};
    for (int j = 0; j < TV; j++) {
        vec weights = exp2_vec(*(vec *)(scores + j * W) - top);
        *(vec *)(scores + j * W) = weights;
        if (tokens == T)
            total += weights;
    }
    float added = 0;
    if (tokens == T)
        for (int i = 0; i < W; i++)
            added += total[i];
    else
        for (int64_t t = 0; t < tokens; t++)
            added += scores[t];
    *sum += added;
}

/* Up to T slots from the runs at *run, *done of it taken already. */
INLINE int64_t next_tile(const int64_t *runs, int64_t end, int64_t *run, int64_t *done, int64_t *slots) {
    int64_t count = 0;
    while (count < T && *run < end) {
        int64_t first = runs[2 * *run] + *done, left = runs[2 * *run + 1] - *done;
        int64_t taken = left < T - count ? left : T - count;
        for (int64_t i = 0; i < taken; i++)
            slots[count + i] = first + i;
        count += taken;
        if (taken == left) {
            *run += 1;
            *done = 0;
        } else
            *done += taken;
    }
    return count;
}

/* scores [T] of the tokens from `ahead` of the row's end on += slope x position, counted from that end: what ALiBi adds, but
 * for a constant, and as small as can be where it matters. */
INLINE void add_slope(float *scores, float slope, int64_t ahead) {
    for (int64_t t = 0; t < T; t++)
        scores[t] += slope * (float)(ahead + t);
}

static void run_task(const Step *s, const int64_t *task, int64_t head, const void *query, const void *keys,
                     const void *values, const float *slopes, float *scratch) {
    const int64_t key_dim = s->key_dim, value_dim = s->value_dim, width = padded(value_dim), group = s->group;
    const int64_t queries = (task[1] - task[0]) * group;
    const int64_t bytes = s->store_dtype == FLOAT32 ? 4 : 2;
    const char *head_keys = (const char *)keys + head * s->num_slots * key_dim * bytes;
    const char *head_values = (const char *)values + head * s->num_slots * value_dim * bytes;
    const int copies_keys = s->store_dtype != FLOAT32, copies_values = copies_keys || width != value_dim;
    float *q = scratch, *tile = q + queries * key_dim, *scores = tile + T * key_dim, *acc = scores + queries * T;
    float *maximum = acc + queries * width, *sum = maximum + queries;
    float *key_rows = sum + queries, *value_copies = key_rows + T * key_dim;

    for (int64_t r = 0; r < task[1] - task[0]; r++) {
        int64_t first = (s->task_rows[task[0] + r] * s->kv_heads + head) * group * key_dim;
        for (int64_t i = 0; i < group * key_dim; i++)
            q[r * group * key_dim + i] = get(query, first + i, s->query_dtype) * (s->scale * LOG2E);
    }
    memset(acc, 0, queries * width * sizeof(float));
    for (int64_t m = 0; m < queries; m++)
        maximum[m] = -INFINITY, sum[m] = 0;

    int64_t slots[2][T], run = task[2], done = 0, position = task[5];
    int64_t count = next_tile(s->runs, task[3], &run, &done, slots[0]);
    for (int current = 0; count; current ^= 1) {
        const int64_t *here = slots[current], *next = slots[current ^ 1];
        int64_t following = next_tile(s->runs, task[3], &run, &done, slots[current ^ 1]);
        const float *key_at[T], *value_at[T];
        Ahead ahead = plan_ahead(head_keys, key_dim * bytes, head_values, value_dim * bytes, next, following);
        for (int64_t t = 0; t < T; t++) {
            int64_t slot = here[t < count ? t : 0]; /* behind the end: any token, its weight is not used */
            const char *key = head_keys + slot * key_dim * bytes, *value = head_values + slot * value_dim * bytes;
            if (copies_keys) {
                for (int64_t d = 0; d < key_dim; d++)
                    key_rows[t * key_dim + d] = from_bfloat16(((const uint16_t *)key)[d]);
                key = (const char *)(key_rows + t * key_dim);
            }
            if (copies_values) {
                for (int64_t d = 0; d < value_dim; d++)
                    value_copies[t * width + d] = get(value, d, s->store_dtype);
                for (int64_t d = value_dim; d < width; d++)
                    value_copies[t * width + d] = 0;
                value = (const char *)(value_copies + t * width);
            }
            key_at[t] = (const float *)key;
            value_at[t] = (const float *)value;
        }
        transpose(key_at, key_dim, tile, &ahead);
        for (int64_t m = 0, n; m < queries; m += n) {
            n = together(queries - m);
            if (n == 3)
                score_block(3, q + m * key_dim, key_dim, tile, scores + m * T, &ahead);
            else if (n == 2)
                score_block(2, q + m * key_dim, key_dim, tile, scores + m * T, &ahead);
            else
                score_block(1, q + m * key_dim, key_dim, tile, scores + m * T, &ahead);
            for (int64_t i = m; slopes && i < m + n; i++)
                add_slope(scores + i * T, slopes[head * group + i % group] * LOG2E,
                          position - s->lengths[s->task_rows[task[0] + i / group]]);
            for (int64_t i = m; i < m + n; i++)
                softmax_tile(scores + i * T, count, maximum + i, sum + i, acc + i * width, width);
            if (n == 3)
                value_rows(3, scores + m * T, value_at, count, width, acc + m * width, &ahead);
            else if (n == 2)
                value_rows(2, scores + m * T, value_at, count, width, acc + m * width, &ahead);
            else
                value_rows(1, scores + m * T, value_at, count, width, acc + m * width, &ahead);
        }
        position += count;
        count = following;
    }
    for (int64_t m = 0; m < queries; m++) {
        int64_t place = ((task[4] + m / group) * s->kv_heads + head) * group + m % group;
        memcpy(s->partials + place * width, acc + m * width, width * sizeof(float));
        s->maxima[2 * place] = maximum[m];
        s->maxima[2 * place + 1] = sum[m];
    }
}

/* One head of one row: its partials, merged, and the sink's share if there is one. */
static void merge(const Step *s, int64_t row, int64_t head, const float *sinks, void *out, float *merged) {
    const int64_t width = padded(s->value_dim), heads = s->kv_heads * s->group;
    const int64_t first = s->row_ends[row], end = s->row_ends[row + 1];
    float top = sinks ? sinks[head] * LOG2E : -INFINITY;
    for (int64_t i = first; i < end; i++) {
        float maximum = s->maxima[2 * (s->row_partials[i] * heads + head)];
        top = maximum > top ? maximum : top;
    }
    float total = sinks ? exp2f(sinks[head] * LOG2E - top) : 0;
    memset(merged, 0, width * sizeof(float));
    for (int64_t i = first; i < end; i++) {
        int64_t place = s->row_partials[i] * heads + head;
        float factor = exp2f(s->maxima[2 * place] - top);
        total += s->maxima[2 * place + 1] * factor;
        for (int64_t d = 0; d < width; d += W)
            *(vec *)(merged + d) += *(const vec *)(s->partials + place * width + d) * factor;
    }
    for (int64_t d = 0; d < s->value_dim; d++) /* a row that sees nothing gets zeros */
        put(out, (row * heads + head) * s->value_dim + d, s->query_dtype, end > first ? merged[d] / total : 0);
}

INLINE void write_rows(const Step *s, const void *from, void *store, int64_t dim) {
    const int64_t size = s->query_dtype == FLOAT32 ? 4 : 2;
    for (int64_t row = 0; row < s->num_rows; row++) {
        if (s->targets[row] < 0)
            continue;
        for (int64_t head = 0; head < s->kv_heads; head++) {
            int64_t source = (row * s->kv_heads + head) * dim, target = (head * s->num_slots + s->targets[row]) * dim;
            if (s->query_dtype == s->store_dtype)
                memcpy((char *)store + target * size, (const char *)from + source * size, dim * size);
            else
                for (int64_t d = 0; d < dim; d++)
                    put(store, target + d, s->store_dtype, get(from, source + d, s->query_dtype));
        }
    }
}

/* Copy whole blocks of one tensor, the i-th source to the i-th target. No block is both.
 *
 * store             [heads, blocks, ·], `head_bytes` between heads, `block_bytes` a block
 * sources, targets  [count] block ids
 */
void hf_paged_copy_blocks(char *store, int64_t heads, int64_t head_bytes, int64_t block_bytes, const int64_t *sources,
                          const int64_t *targets, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t head = 0; head < heads; head++) {
            char *base = store + head * head_bytes;
            memcpy(base + targets[i] * block_bytes, base + sources[i] * block_bytes, block_bytes);
        }
}

/* Floats of scratch that a thread needs for tasks of up to `queries` queries. */
int64_t hf_paged_scratch(int64_t queries, int64_t key_dim, int64_t value_dim) {
    int64_t width = padded(value_dim);
    return queries * (key_dim + T + width + 2) + T * (2 * key_dim + width) + 64;
}

int64_t hf_paged_padded(int64_t dim) { return padded(dim); }

/* One layer.
 *
 * query       [num_rows, kv_heads * group, key_dim]
 * key, value  [num_rows, kv_heads, dim], this step's, to be written; NULL: they are in the store
 * sinks       [kv_heads * group] float32 or NULL
 * slopes      [kv_heads * group] float32, of ALiBi, or NULL
 * out         [num_rows, kv_heads * group, value_dim], the query's dtype
 */
void hf_paged_decode(const Step *s, const void *query, const void *key, const void *value, void *keys, void *values,
                     const float *sinks, const float *slopes, void *out) {
    if (key) {
        write_rows(s, key, keys, s->key_dim);
        write_rows(s, value, values, s->value_dim);
    }
    const int64_t work = s->num_tasks * s->kv_heads, heads = s->kv_heads * s->group;
#pragma omp parallel num_threads((int)s->num_threads) if (s->num_threads > 1)
    {
#ifdef _OPENMP
        float *scratch = s->scratch + omp_get_thread_num() * s->scratch_floats;
#else
        float *scratch = s->scratch;
#endif
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < work; i++)
            run_task(s, s->tasks + 6 * (i / s->kv_heads), i % s->kv_heads, query, keys, values, slopes, scratch);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < s->num_rows * heads; i++)
            merge(s, i / heads, i % heads, sinks, out, scratch);
    }
}

/* The checksum's arithmetic: 64-bit lanes, as many as fit a vector; a stripe of 8 lanes, whatever the vectors' width. */
typedef uint64_t lanes __attribute__((vector_size(4 * W), aligned(1), may_alias));
#define STRIPE 64 /* bytes */
#define PARTS (STRIPE / (4 * W))
/* A chunk is read at 4 places at a time: a thread that reads at one gets two thirds of what it can have from memory. */
#define STREAMS 4
#define FETCH 1024 /* bytes ahead; no fetch is too far, and none behind the end is a fault */

static const uint64_t KEYS[8] = { /* where each lane's keys begin: digits of pi */
    0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89,
    0x452821e638d01377, 0xbe5466cf34e90c6c, 0xc0ac29b7c97c50dd, 0x3f84d5b5b5470917};

/* The low half of each lane times its high half. */
INLINE lanes multiply_halves(lanes x) {
#if defined(__AVX512F__)
    return (lanes)_mm512_mul_epu32((__m512i)x, (__m512i)(x >> 32));
#elif defined(__AVX2__)
    return (lanes)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#else
    return (x & 0xffffffff) * (x >> 32);
#endif
}

/* Take one stripe in: sums = rotated sums + (low + 1) * (high + 2^32) of data ^ keys, the halves of each lane.
 *
 * Whatever changes in one half changes the product: at most 2^31 divides the change, and at most 2^32 the other factor, so that
 * what they give is no multiple of 2^64. The rotation, and keys that differ from stripe to stripe, make it depend on the
 * order. */
INLINE void take_stripe(const char *data, lanes *sums, const lanes *keys) {
    for (int part = 0; part < PARTS; part++) {
        lanes x = *(const lanes *)(data + part * 4 * W) ^ keys[part];
        sums[part] = (sums[part] << 29 | sums[part] >> 35) + (multiply_halves(x) + (x << 32) + (x >> 32));
    }
}

INLINE void next_keys(lanes *keys) {
    for (int part = 0; part < PARTS; part++)
        keys[part] += 0x9e3779b97f4a7c15;
}

/* To one and from one: no two x give the same. (The end of MurmurHash3.) */
INLINE uint64_t mix(uint64_t x) {
    x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
    return x ^ x >> 33;
}

static void checksum_chunk(const char *data, int64_t bytes, uint64_t storage, uint64_t chunk, uint64_t *out) {
    lanes sums[STREAMS][PARTS], keys[PARTS];
    memset(sums, 0, sizeof sums);
    memcpy(keys, KEYS, sizeof keys);
    const int64_t length = bytes / (STREAMS * STRIPE) * STRIPE;
    for (int64_t done = 0; done < length; done += STRIPE) {
        for (int stream = 0; stream < STREAMS; stream++) {
            __builtin_prefetch(data + stream * length + done + FETCH, 0, 3);
            take_stripe(data + stream * length + done, sums[stream], keys);
        }
        next_keys(keys);
    }
    for (int64_t done = STREAMS * length; done < bytes; done += STRIPE) { /* what is left is the first stream's */
        char last[STRIPE] = {0};
        memcpy(last, data + done, bytes - done < STRIPE ? bytes - done : STRIPE);
        take_stripe(last, sums[0], keys);
        next_keys(keys);
    }
    uint64_t lane[STREAMS * 8];
    memcpy(lane, sums, sizeof lane);
    out[0] = mix(mix(mix(storage + KEYS[0]) + chunk) + (uint64_t)bytes);
    out[1] = mix(out[0] + KEYS[1]);
    for (int i = 0; i < STREAMS * 8; i++) {
        out[0] = mix(out[0] ^ lane[i]);
        out[1] = mix(out[1] ^ lane[STREAMS * 8 - 1 - i]);
    }
}

/* Two 64-bit numbers of what lies in `storages`, which depend on every bit and on the order, and not on the number of threads:
 * each chunk is taken by itself, and what they give is added up. A change within one aligned word of 4 bytes is always seen.
 *
 * storages  [num_storages, 3]: address, bytes, and the number of its first chunk; chunks are numbered through all storages, and
 *           each begins at a multiple of chunk_bytes, itself a multiple of 64, in its storage
 * sums      [2]
 */
void hf_paged_checksum(const uint64_t *storages, int64_t num_storages, int64_t chunk_bytes, int64_t num_chunks,
                       int64_t num_threads, uint64_t *sums) {
    uint64_t first = 0, second = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : first, second) num_threads((int)num_threads) if (num_threads > 1)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        int64_t low = 0, high = num_storages; /* the last storage whose first chunk is not behind this one */
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            if ((int64_t)storages[3 * middle + 2] <= chunk)
                low = middle;
            else
                high = middle;
        }
        const uint64_t *storage = storages + 3 * low;
        int64_t inside = chunk - (int64_t)storage[2], left = (int64_t)storage[1] - inside * chunk_bytes;
        uint64_t out[2];
        checksum_chunk((const char *)(uintptr_t)storage[0] + inside * chunk_bytes, left < chunk_bytes ? left : chunk_bytes,
                       (uint64_t)low, (uint64_t)inside, out);
        first += out[0], second += out[1];
    }
    sums[0] = first, sums[1] = second;
}
