/* The kernels of kernels/native.py, which says what they are for and how they work. They use GCC's vector extensions and no
   intrinsics: the code is right on any processor, and fast where its vectors are as wide as the hardware's. */
#include <math.h>
#include <string.h>
/* W: numbers in a vector; MOST: vectors in a tile */
#if defined(__AVX512F__)
#define W 16
#define MOST 4
#elif defined(__AVX__)
#define W 8
#define MOST 2
#else
#define W 4
#define MOST 4
#endif
#define PAD(n) (((n) + 15) & ~15LL)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
typedef long long wide;
typedef float v __attribute__((vector_size(4 * W)));
typedef int vi __attribute__((vector_size(4 * W)));
typedef float some __attribute__((vector_size(4 * W), aligned(4), may_alias));
#define AT(p) (*(some *)(p))
#define ALL(x) ((v){} + (x))
#if defined(__AVX512F__) /* else GCC reads B anew for each row */
#define HOLD(x) __asm__("" : "+v"(x))
#else
#define HOLD(x)
#endif

static inline v pick(vi mask, v a, v b) { return (v)((mask & (vi)a) | (~mask & (vi)b)); }
static inline v between(v x, float low, float high) { /* NaN stays */
    x = pick(x < low, ALL(low), x);
    return pick(x > high, ALL(high), x);
}

/* x p(x^2) / q(x^2), the best of these degrees up to 7.9, where tanh is one; off by 4e-7 at most */
static inline v tanh_(v x) {
    x = between(x, -7.9f, 7.9f);
    v s = x * x, p = s * 1.141472761e-05f + 2.948516547e-03f, q = s * 2.457255716e-07f + 2.383960861e-04f;
    p = p * s + 1.292269024e-01f, q = q * s + 2.380353266e-02f;
    p = p * s + 9.999994258e-01f, q = q * s + 4.625581082e-01f;
    return x * p / (q * s + 1);
}

/* Cephes' expf and logf. exp x = (1 + p) s, with s a power of two */
static inline v exp_parts(v x, v *s) {
    x = between(x, -87.3f, 88.3f);
    v t = x * 1.44269504088896341f + 12582912.0f, n = t - 12582912.0f;
    v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *s = (v)(((vi)t << 23) + 0x3f800000);
    return p * r * r + r;
}

static inline v exp_(v x) {
    v s, p = exp_parts(x, &s);
    return (p + 1) * s;
}

static inline v expm1_(v x) {
    v s, p = exp_parts(x, &s);
    return p * s + (s - 1);
}

static inline v log_(v x) { /* of normal numbers above zero */
    vi e = ((vi)x - 0x3f3504f3) >> 23;
    v f = (v)((vi)x - (e << 23)) - 1, n = __builtin_convertvector(e, v);
    v p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return f + (p * f * f * f - n * 2.12194440e-4f - 0.5f * f * f) + n * 0.693359375f + (x - x);
}

static inline v get(const float *p, wide i, wide count) { /* what lies beyond the end is zero */
    if (i + W <= count) return AT(p + i);
    v x = {};
    for (wide l = 0; l < count - i; l++) x[l] = p[i + l];
    return x;
}

static inline void put(float *p, wide i, wide count, v x) {
    if (i + W <= count) AT(p + i) = x;
    else for (wide l = 0; l < count - i; l++) p[i + l] = x[l];
}

static inline vi counts(const char *mask, wide i, wide count) { /* which of the numbers at i are there, and count */
    vi m = {};
    for (wide l = 0; l < MIN(W, count - i); l++) m[l] = mask && !mask[i + l] ? 0 : -1;
    return m;
}

static inline float sum_of(v x) {
    float s = 0;
    for (wide l = 0; l < W; l++) s += x[l];
    return s;
}

#define TILE wide depth, const float *a, wide ar, wide ak, const float *b, wide ldb, \
             const float *init, wide ldi, float *c, wide ldc

/* The tile of a product: some rows by n vectors. Every sum is a variable of its own, so that none leaves the registers. */
#define VECTORS_1(DO, r) DO(r, 0)
#define VECTORS_2(DO, r) VECTORS_1(DO, r) DO(r, 1)
#define VECTORS_3(DO, r) VECTORS_2(DO, r) DO(r, 2)
#define VECTORS_4(DO, r) VECTORS_3(DO, r) DO(r, 3)
#define ROWS_1(VECTORS, DO) VECTORS(DO, 0)
#define ROWS_4(VECTORS, DO) VECTORS(DO, 0) VECTORS(DO, 1) VECTORS(DO, 2) VECTORS(DO, 3)
#define START(r, j) v c##r##j = AT(init + r * ldi + j * W);
#define READ(r, j) v b##j = AT(b + j * W);
#define KEEP(r, j) HOLD(b##j);
#define ADD(r, j) c##r##j += a[r * ar] * b##j;
#define WRITE(r, j) AT(c + r * ldc + j * W) = c##r##j;
#define DEFINE_TILE(rows, n) \
    static void tile_##rows##_##n(TILE) { \
        ROWS_##rows(VECTORS_##n, START) \
        for (wide k = 0; k < depth; k++, a += ak, b += ldb) { \
            VECTORS_##n(READ, 0) \
            VECTORS_##n(KEEP, 0) \
            ROWS_##rows(VECTORS_##n, ADD) \
        } \
        ROWS_##rows(VECTORS_##n, WRITE) \
    }
DEFINE_TILE(1, 1)
DEFINE_TILE(1, 2)
DEFINE_TILE(1, 3)
DEFINE_TILE(1, 4)
DEFINE_TILE(4, 1)
DEFINE_TILE(4, 2)
DEFINE_TILE(4, 3)
DEFINE_TILE(4, 4)
#define ROWS 4 /* of the larger tiles; kernels/native.py has the same number */
static void (*const TILES[2][5])(TILE) = {{0, tile_1_1, tile_1_2, tile_1_3, tile_1_4}, {0, tile_4_1, tile_4_2, tile_4_3, tile_4_4}};

/* c[rows, cols] = init[rows, cols] + a[rows, depth] b[depth, cols]; cols is a multiple of 16 */
static void product(wide rows, wide cols, TILE) {
    for (wide j = 0; j < cols; j += W * MOST) {
        wide n = MIN(MOST, (cols - j) / W), r = 0;
        for (; r + ROWS <= rows; r += ROWS)
            TILES[1][n](depth, a + r * ar, ar, ak, b + j, ldb, init + r * ldi + j, ldi, c + r * ldc + j, ldc);
        for (; r < rows; r++)
            TILES[0][n](depth, a + r * ar, ar, ak, b + j, ldb, init + r * ldi + j, ldi, c + r * ldc + j, ldc);
    }
}

static void pack(float *to, wide rows, wide cols, const float *from, wide by_row, wide by_col) {
    for (wide r = 0; r < rows; r++, to += PAD(cols)) {
        for (wide c = 0; c < cols; c++) to[c] = from[r * by_row + c * by_col];
        for (wide c = cols; c < PAD(cols); c++) to[c] = 0;
    }
}

static void unpack(float *to, wide by_row, wide by_col, wide rows, wide cols, const float *from, wide ld) {
    for (wide r = 0; r < rows; r++)
        for (wide c = 0; c < cols; c++) to[r * by_row + c * by_col] = from[r * ld + c];
}

/* count: samples of a set of weights. p: ids, weights, biases. With `own` weights are [sets, in, out], else [out, in]. */
struct shape { wide count, sets, own, layers, ids, block, tanh, widths[5]; };

static void activate(float *h, wide count, wide tanh) {
    if (tanh) for (wide i = 0; i < count; i += W) AT(h + i) = tanh_(AT(h + i));
    else for (wide i = 0; i < count; i += W) { v x = AT(h + i); AT(h + i) = pick(x < 0, ALL(0), x); }
}

void mlp_forward(const struct shape *z, wide keep, const float *x, const float *const *p, float *hidden, float *y,
                 float *scratch) {
    const wide *w = z->widths, last = z->layers - 1, held = keep ? z->count : z->block;
    for (wide set = 0; set < z->sets; set++) {
        float *weight[4], *bias[4], *at = scratch;
        for (wide k = 0; k <= last; k++) {
            wide in = w[k], out = w[k + 1], pad = PAD(out), rows = k == 0 && z->ids ? z->block : 1;
            weight[k] = at, bias[k] = at += in * pad, at += rows * pad;
            pack(weight[k], in, out, p[1 + k] + set * in * out, z->own ? out : 1, z->own ? 1 : in);
            pack(bias[k], rows, out, p[2 + last + k] + set * out, 0, 1);
            if (rows > 1) for (wide r = 0; r < rows; r++) for (wide c = 0; c < out; c++)
                bias[k][r * pad + c] += p[0][r % z->ids * out + c];
        }
        for (wide m = 0; m < z->count; m += z->block) {
            wide rows = MIN(z->block, z->count - m), lda = z->sets * w[0];
            const float *a = x + m * lda + set * w[0];
            float *h = hidden;
            for (wide k = 0; k <= last; k++) {
                wide pad = PAD(w[k + 1]);
                float *to = k == last ? at : h + (keep ? m * pad : 0);
                product(rows, pad, w[k], a, lda, 1, weight[k], pad, bias[k], k == 0 && z->ids ? pad : 0, to, pad);
                if (k < last) activate(to, rows * pad, z->tanh);
                a = to, lda = pad, h += held * pad;
            }
            wide out = w[last + 1];
            unpack(y + (m * z->sets + set) * out, z->sets * out, 1, rows, out, at, PAD(out));
        }
        if (keep) for (wide k = 1; k <= last; k++) hidden += held * PAD(w[k]);
    }
}

/* g *= the activation's slope at its value h; and its sums over samples, for each of n agents, are added to `sums` */
static void slope(float *g, const float *h, wide rows, wide pad, wide tanh, wide n, float *sums) {
    for (wide agent = 0; agent < n; agent++)
        for (wide c = 0; c < pad; c += W) {
            v sum = AT(sums + agent * pad + c);
            for (wide i = agent * pad + c; i < rows * pad; i += n * pad) {
                v y = AT(h + i), d = AT(g + i);
                sum += AT(g + i) = tanh ? d - d * y * y : pick(y <= 0, ALL(0), d);
            }
            AT(sums + agent * pad + c) = sum;
        }
}

void mlp_backward(const struct shape *z, const float *x, const float *const *p, const float *hidden, const float *gy,
                  float *gx, float *grads, float *scratch) {
    const wide *w = z->widths, last = z->layers - 1, out = w[last + 1];
    for (wide set = 0; set < z->sets; set++) {
        float *weight[4], *sum[4], *bias[4], *at = scratch, *zero, *g0, *g1;
        wide widest = 0;
        for (wide k = 0; k <= last; k++) { /* weights [out, in]; sums of their gradients [in, out], the last [out, in] */
            wide in = w[k], wo = w[k + 1];
            weight[k] = at, at += wo * PAD(in);
            if (k || gx) pack(weight[k], wo, in, p[1 + k] + set * in * wo, z->own ? 1 : in, z->own ? wo : 1);
            if (widest < PAD(in)) widest = PAD(in);
        }
        zero = at;
        at += widest;
        for (wide k = 0; k <= last; k++) {
            sum[k] = at, at += k < last ? w[k] * PAD(w[k + 1]) : out * PAD(w[k]);
            bias[k] = at, at += PAD(w[k + 1]) * (k == 0 && z->ids ? z->ids : 1);
        }
        memset(zero, 0, (char *)at - (char *)zero);
        g0 = at, g1 = at + z->block * widest;
        for (wide m = 0; m < z->count; m += z->block) {
            wide rows = MIN(z->block, z->count - m), ldg = z->sets * out, ldx = z->sets * w[0];
            const float *g = gy + (m * z->sets + set) * out, *end = hidden;
            for (wide k = 1; k <= last; k++) end += z->count * PAD(w[k]);
            for (wide r = 0; r < rows; r++) for (wide c = 0; c < out; c++) bias[last][c] += g[r * ldg + c];
            for (wide k = last; k >= 0; k--) {
                wide pad = PAD(w[k]), po = PAD(w[k + 1]), lda = k ? pad : ldx;
                const float *a = k ? (end -= z->count * pad) + m * pad : x + m * ldx + set * w[0];
                if (grads && k == last) product(out, pad, rows, g, 1, ldg, a, lda, sum[k], pad, sum[k], pad);
                else if (grads) product(w[k], po, rows, a, 1, lda, g, po, sum[k], po, sum[k], po);
                if (k == 0 && !gx) break;
                float *to = k & 1 ? g1 : g0;
                product(rows, pad, w[k + 1], g, ldg, 1, weight[k], pad, zero, 0, to, pad);
                if (k) slope(to, a, rows, pad, z->tanh, k == 1 && z->ids ? z->ids : 1, bias[k - 1]);
                else unpack(gx + m * ldx + set * w[0], ldx, 1, rows, w[0], to, pad);
                g = to, ldg = pad;
            }
        }
        for (wide k = 1; k <= last; k++) hidden += z->count * PAD(w[k]);
        if (!grads) continue;
        float *to = grads;
        for (wide n = 0; n < z->ids; n++, to += w[1])
            for (wide c = 0; c < w[1]; c++) to[c] = bias[0][n * PAD(w[1]) + c];
        for (wide n = 1; n < z->ids; n++)
            for (wide c = 0; c < w[1]; c++) bias[0][c] += bias[0][n * PAD(w[1]) + c];
        for (wide k = 0; k <= last; to += z->sets * w[k] * w[k + 1], k++) {
            wide in = w[k], wo = w[k + 1], by_in = z->own ? wo : 1, by_out = z->own ? 1 : in;
            if (k < last) unpack(to + set * in * wo, by_in, by_out, in, wo, sum[k], PAD(wo));
            else unpack(to + set * in * wo, by_out, by_in, wo, in, sum[k], PAD(in));
        }
        for (wide k = 0; k <= last; to += z->sets * w[k + 1], k++)
            memcpy(to + set * w[k + 1], bias[k], w[k + 1] * sizeof(float));
    }
}

/* W rows of logits, shifted so that the largest is zero, one to a lane; returns the sum of their exponentials */
static inline v softmax(const float *logits, wide row, wide count, wide n, v *t) {
    v most = {}, sum = {};
    for (wide a = 0; a < n; a++) {
        for (wide l = 0; l < W; l++) t[a][l] = logits[MIN(row + l, count - 1) * n + a];
        most = a ? pick(t[a] > most, t[a], most) : t[0];
    }
    for (wide a = 0; a < n; a++) sum += exp_(t[a] -= most);
    return sum;
}

void choose(wide count, wide n, const float *logits, const float *noise, wide *action, float *log_prob) {
    v t[n];
    for (wide row = 0; row < count; row += W) {
        v sum = softmax(logits, row, count, n, t), u = {}, best = {}, of_best = {};
        vi which = {};
        for (wide a = 0; a < n; a++) { /* Gumbel's maximum */
            for (wide l = 0; l < W; l++) u[l] = noise[MIN(row + l, count - 1) * n + a];
            v score = t[a] - log_(-log_(between(u, 0x1p-24f, 1 - 0x1p-24f)));
            vi better = score > best;
            if (a == 0) better = ~(vi){};
            which = (better & (int)a) | (~better & which);
            best = pick(better, score, best), of_best = pick(better, t[a], of_best);
        }
        of_best -= log_(sum);
        for (wide l = 0; l < MIN(W, count - row); l++) action[row + l] = which[l], log_prob[row + l] = of_best[l];
    }
}

/* Without `grad` log pi(a) and the entropy are written; with it they are their gradients:
   d log pi(a) = 1[a] - p, and dH = -p (log p + H) */
void log_prob_and_entropy(wide count, wide n, const float *logits, const wide *action, float *log_prob, float *entropy,
                          float *grad) {
    v t[n];
    for (wide row = 0; row < count; row += W) {
        wide here = MIN(W, count - row);
        v sum = softmax(logits, row, count, n, t), log_sum = log_(sum), chosen = {}, h = {}, by_log = {}, by_h = {};
        vi which = {};
        for (wide l = 0; l < here; l++) which[l] = action[row + l];
        for (wide a = 0; a < n; a++) {
            t[a] -= log_sum;
            chosen = pick(which == (int)a, t[a], chosen), h -= exp_(t[a]) * t[a];
        }
        if (!grad) {
            for (wide l = 0; l < here; l++) log_prob[row + l] = chosen[l], entropy[row + l] = h[l];
            continue;
        }
        for (wide l = 0; l < here; l++) by_log[l] = log_prob[row + l], by_h[l] = entropy[row + l];
        for (wide a = 0; a < n; a++) {
            v p = exp_(t[a]), d = by_log * (pick(which == (int)a, ALL(1), ALL(0)) - p) - by_h * p * (t[a] + h);
            for (wide l = 0; l < here; l++) grad[(row + l) * n + a] = d[l];
        }
    }
}

/* everything [steps, rows, n]; each agent of a row walks back in time */
void gae(wide steps, wide rows, wide n, wide by_step, wide by_row, wide by_agent, double gamma, double lambda,
         const float *reward, const float *value_t, const float *value_tp1, const char *terminated, const char *cut,
         float *advantage) {
    wide all = rows * n;
    float d = gamma, w = gamma * lambda;
    for (wide t = steps - 1; t >= 0; t--)
        for (wide b = 0; b < rows; b++)
            for (wide k = 0; k < n; k++) {
                wide i = t * all + b * n + k;
                float delta = reward[i] + (terminated[i] ? 0 : d * value_tp1[i]) - value_t[i];
                char ends = terminated[i] | cut[t * by_step + b * by_row + k * by_agent] | (t == steps - 1);
                advantage[i] = delta + (ends ? 0 : w * advantage[i + all]);
            }
}

/* ops/losses.ppo. sums: what is to descend, -min(rho A, clip(rho) A) - weight H; grad: its gradient by log_prob and by
   entropy; means: of the loss, the entropy, the approximate KL and of what is clipped */
void ppo(wide count, double clip, double weight, const float *log_prob, const float *entropy, const float *old,
         const float *advantage, const char *mask, float *sum, float *grad, float *means) {
    float low = 1 - clip, high = 1 + clip, w = weight;
    v total[4] = {}, active = {};
    for (wide i = 0; i < count; i += W) {
        vi in = counts(mask, i, count);
        v a = get(advantage, i, count), d = get(log_prob, i, count) - get(old, i, count), h = get(entropy, i, count), zero = {};
        v less = expm1_(d), ratio = exp_(d), free = ratio * a, held = between(ratio, low, high) * a;
        vi out = (ratio < low) | (ratio > high), holds = held < free;
        put(grad, i, count, pick(in & ~(out & holds), -free, zero));
        put(grad + count, i, count, pick(in, ALL(-w), zero));
        total[0] += pick(in, -pick(holds, held, free), zero), total[1] += pick(in, h, zero);
        total[2] += pick(in, less - d, zero);
        total[3] += pick(in & ((ratio - 1 > (float)clip) | (1 - ratio > (float)clip)), ALL(1), zero);
        active += pick(in, ALL(1), zero);
    }
    float n = sum_of(active);
    for (wide k = 0; k < 4; k++) means[k] = sum_of(total[k]) / (n < 1 ? 1 : n);
    *sum = sum_of(total[0]) - w * sum_of(total[1]);
}

/* ops/losses.value: the sum of errors, its gradient and the mean. Without `old` nothing is held; huber 0 is none */
void value_loss(wide count, double clip, double huber, const float *value, const float *old, const float *target,
                const char *mask, float *sum, float *grad, float *mean) {
    float c = clip, k = huber > 0 ? huber : INFINITY;
    v total = {}, active = {};
    for (wide i = 0; i < count; i += W) {
        vi in = counts(mask, i, count);
        v x = get(value, i, count), y = get(target, i, count), zero = {}, d = x - y, slope = between(d, -k, k);
        v error = slope * (d - 0.5f * slope);
        if (old) {
            v o = get(old, i, count), moved = x - o, e = o + between(moved, -c, c) - y, other = between(e, -k, k);
            v held = other * (e - 0.5f * other);
            vi far = (moved < -c) | (moved > c), worse = ~(held <= error); /* NaN too */
            slope = pick(far & (held >= error), pick(worse, zero, 0.5f * slope), pick(worse, other, slope));
            error = pick(worse, held, error);
        }
        put(grad, i, count, pick(in, slope, zero));
        total += pick(in, error, zero), active += pick(in, ALL(1), zero);
    }
    float n = sum_of(active);
    *sum = sum_of(total), *mean = *sum / (n < 1 ? 1 : n);
}

/* One step of AdamW down `grad`, held to the norm `clip` (0: as it is); none where the norm is not finite, or ever was not */
void adamw(wide count, double clip, double decay, const float *rate, const char *keep, float *weight, const float *grad,
           float *first, float *second, float *steps, char *broken, float *norm) {
    v squares = {};
    for (wide i = 0; i < count; i += W) squares += get(grad, i, count) * get(grad, i, count);
    *norm = __builtin_sqrtf(sum_of(squares));
    if (!(*norm <= 3.4028234e38f)) *broken = 1;
    if (*broken || (keep && !*keep)) return;
    double lr = *rate, n = *steps += 1, scale = clip > 0 && clip < *norm + 1e-6 ? clip / (*norm + 1e-6) : 1;
    float s = scale, less = 1 - lr * decay, rise = lr / (1 - pow(0.9, n)), root = 1 / sqrt(1 - pow(0.999, n));
    for (wide i = 0; i < count; i++) {
        float g = grad[i] * s, m = first[i] += 0.1f * (g - first[i]), q = second[i] = 0.999f * second[i] + 0.001f * g * g;
        weight[i] = less * weight[i] - rise * m / (__builtin_sqrtf(q) * root + 1e-5f);
    }
}
