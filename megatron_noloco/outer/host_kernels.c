/* The arithmetic of a round on fp32 vectors in host memory, with the bits of the same operations in torch.

Built without fused multiply-adds (`host_kernels.py`): products and sums round apart, as the format asks. Loops are
simple, so that compilers use the processor's vector instructions, and write means to their places at once: a copy
of whole rows waits for memory. `ivdep` is for results in the place of an argument. A function works on a part,
begin..end, of the elements of a vector, or of the blocks (`payload.Blocks`) of given numbers, each in one pass; a
short last block of a vector of `length` elements is padded with zeros. */
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 512
#define CELLS 4
#define BIG 1073741824.0f /* of the integers: 2^30 */
#define NEAR 2 /* of these as in `payload`: _NEAR, _UNLUCKY, _FINEST, _SMALLEST */
#define WIDTH (2 * NEAR + 1)
#define UNLUCKY 8.0f
#define FINEST 0x1p-22f
#define SMALLEST 0x1p-100f
#define EACH for (int i = 0; i < BLOCK; i++)

typedef int64_t place;

/* The elements of a block, in `padded` where it is short, and what its checksum has of the length. */
static const float *row_of(const float *vector, place length, place block, float *padded, int32_t *rest) {
    place start = block * BLOCK, size = length - start;
    *rest = 0;
    if (size >= BLOCK) return vector + start;
    memset(padded, 0, BLOCK * sizeof(float));
    memcpy(padded, vector + start, size * sizeof(float));
    *rest = (int32_t)size;
    return padded;
}

static int elements_of(place length, place block) {
    return length - block * BLOCK < BLOCK ? (int)(length - block * BLOCK) : BLOCK;
}

/* n of each element: INT_MIN for what is not a number. */
static void whole_steps(const float *row, float step, int32_t *n) {
    float inverse = step > 0 ? 1 / step : 0;
    EACH {
        float y = row[i] * inverse;
        float bounded = y > BIG ? BIG : y < -BIG ? -BIG : y;
        n[i] = y == y ? (int32_t)rintf(bounded) : INT_MIN;
    }
}

static int32_t checksum(const int32_t *n, const int32_t *weights) {
    int32_t total = 0;
    EACH total += weights[i] * n[i];
    return total;
}

static void pack(int bits, const uint8_t *d, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, d, BLOCK);
    } else if (bits == 4) {
        for (int i = 0; i < 256; i++) out[i] = (d[i] & 15) | d[i + 256] << 4;
    } else { /* planes of 2 bits and of 1 */
        for (int i = 0; i < 128; i++)
            out[i] = (d[i] & 3) | (d[i + 128] & 3) << 2 | (d[i + 256] & 3) << 4 | (d[i + 384] & 3) << 6;
        for (int i = 0; i < 64; i++) {
            uint8_t plane = 0;
            for (int part = 0; part < 8; part++) plane |= (d[i + 64 * part] >> 2 & 1) << part;
            out[128 + i] = plane;
        }
    }
}

static void unpack(int bits, const uint8_t *code, uint8_t *d) {
    if (bits == 8) {
        memcpy(d, code, BLOCK);
    } else if (bits == 4) {
        for (int i = 0; i < 256; i++) d[i] = code[i] & 15, d[i + 256] = code[i] >> 4;
    } else {
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 128; i++) d[128 * part + i] = code[i] >> 2 * part & 3;
        for (int part = 0; part < 8; part++)
            for (int i = 0; i < 64; i++) d[64 * part + i] |= (code[128 + i] >> part & 1) << 2;
    }
}

/* The differences to a member, m = n_theirs - n, from its digits, of which the second may be NULL.

Returns whether they fit; `unequal` is set where the vectors differ in length, `squares` to the sum of m^2. */
static bool differences(int bits, const uint8_t *low, const uint8_t *high, place block, const int32_t *n,
                        const int32_t *weights, int32_t theirs, int32_t *m, bool *unequal, int64_t *squares) {
    uint8_t first[BLOCK], second[BLOCK];
    int wide = high ? 2 * bits : bits;
    int32_t half = 1 << (wide - 1), mask = (1 << wide) - 1, total = 0, least = 0;
    unpack(bits, low + block * 64 * bits, first);
    if (high) {
        unpack(bits, high + block * 64 * bits, second);
        EACH m[i] = second[i] << bits | first[i];
    } else {
        EACH m[i] = first[i];
    }
    EACH {
        m[i] = ((m[i] - n[i] + half) & mask) - half;
        total += weights[i] * (n[i] + m[i]);
        least = m[i] < least ? m[i] : least;
    }
    if (high) { /* of 16 bits: the sum does not fit into 32 */
        int64_t sum = 0;
        EACH sum += (int64_t)m[i] * m[i];
        *squares = sum;
    } else {
        int32_t sum = 0;
        EACH sum += m[i] * m[i];
        *squares = sum;
    }
    int32_t off = theirs - total;
    *unequal |= (off & mask) != 0;
    return off == 0 && least > -half;
}

void sketch(place begin, place end, const float *vector, place length, const float *signs, float *out) {
    float padded[BLOCK], sums[BLOCK / 2];
    int32_t rest;
    for (place block = begin; block < end; block++) {
        const float *row = row_of(vector, length, block, padded, &rest);
        for (int i = 0; i < 256; i++) sums[i] = row[i] * signs[i] + row[i + 256] * signs[i + 256];
        for (int i = 0; i < 128; i++) sums[i] += sums[i + 128];
        for (int i = 0; i < 64; i++) sums[i] += sums[i + 64];
        for (int i = 0; i < 32; i++) sums[i] += sums[i + 32];
        for (int i = 0; i < 16; i++) sums[i] += sums[i + 16];
        for (int i = 0; i < 8; i++) sums[i] += sums[i + 8];
        for (int i = 0; i < CELLS; i++) out[block * CELLS + i] = sums[i] + sums[i + CELLS];
    }
}

static float energy(const float *cells) {
    return (cells[0] * cells[0] + cells[2] * cells[2]) + (cells[1] * cells[1] + cells[3] * cells[3]);
}

static float root(float x) { return (float)sqrt((double)x); }

/* See `payload._smooth`: of the block in the middle of 2 NEAR + 1, whose first is at `first` of a ring. */
static float smooth(const float *ring, place first) {
    float total = 0, own = ring[(first + NEAR) % WIDTH];
    for (int i = 0; i < WIDTH; i++) total += ring[(first + i) % WIDTH];
    float mean = total / WIDTH, most = UNLUCKY * own;
    if (most < mean) mean = most;
    return (mean > own ? mean : own) / BLOCK;
}

/* See `Codec.find_steps`: of blocks from 0 to `end`, and for `members` sketches. */
void find_steps(place end, int members, const float **sketches, float units, float *steps) {
    float apart[WIDTH] = {0}, size[WIDTH] = {0};
    for (place i = 0; i < end + NEAR; i++) {
        float all = 0, distance = 0;
        if (i < end) {
            const float *first = sketches[0] + i * CELLS;
            all = energy(first);
            for (int member = 1; member < members; member++) {
                const float *other = sketches[member] + i * CELLS;
                float difference[CELLS];
                for (int cell = 0; cell < CELLS; cell++) difference[cell] = first[cell] - other[cell];
                distance += energy(difference) / (members - 1);
                all += energy(other);
            }
            bool finite = isfinite(all) && isfinite(distance);
            steps[i] = finite;
            if (!finite) all = distance = 0;
        }
        apart[i % WIDTH] = distance, size[i % WIDTH] = all;
        if (i < NEAR) continue;
        float step = root(smooth(apart, i + 1)) * units, least = root(smooth(size, i + 1) / members) * FINEST;
        if (step < least) step = least;
        if (step < SMALLEST) step = SMALLEST;
        step *= 1 + 1.0f / 256;
        uint32_t word;
        memcpy(&word, &step, sizeof word);
        word = (word + (word >> 16 & 1) + 0x7FFF) & 0xFFFF0000; /* to bf16 */
        memcpy(&step, &word, sizeof step);
        steps[i - NEAR] *= step;
    }
}

void encode(place begin, place end, const float *vector, place length, const place *numbers, const float *steps,
            int bits, int digit, const int32_t *weights, uint8_t *codes, int32_t *checksums) {
    float padded[BLOCK];
    int32_t n[BLOCK], rest;
    uint8_t d[BLOCK];
    for (place block = begin; block < end; block++) {
        whole_steps(row_of(vector, length, numbers[block], padded, &rest), steps[block], n);
        checksums[block] = checksum(n, weights) + rest;
        EACH d[i] = (uint8_t)(n[i] >> bits * digit);
        pack(bits, d, codes + block * 64 * bits);
    }
}

/* Fill `out` with a pair's mean, and `right`; add to the variance. Returns whether vectors differ in length. */
bool average(place begin, place end, const float *vector, place length, const place *numbers, const float *steps,
             int bits, const int32_t *weights, const uint8_t *low, const uint8_t *high, const int32_t *checksums,
             float *out, bool *right, double *variance) {
    float padded[BLOCK];
    int32_t n[BLOCK], m[BLOCK], rest;
    int64_t squares;
    bool unequal = false;
    for (place block = begin; block < end; block++) {
        const float *row = row_of(vector, length, numbers[block], padded, &rest);
        float step = steps[block];
        whole_steps(row, step, n);
        bool fits = differences(bits, low, high, block, n, weights, checksums[block] - rest, m, &unequal, &squares);
        right[block] = fits && step > 0;
        float scale = step / 2, *mean = out + numbers[block] * BLOCK;
        int size = elements_of(length, numbers[block]);
        if (!right[block]) {
            if (mean != row) memcpy(mean, row, size * sizeof(float));
            continue;
        }
#pragma GCC ivdep
        for (int i = 0; i < size; i++) mean[i] = (float)m[i] * scale + row[i];
        *variance += (double)step * step * squares / 2;
    }
    return unequal;
}

/* Fill `sums`, of `width` bits, with the sums of n over a group; otherwise as `average`. */
bool sum_of(place begin, place end, const float *vector, place length, const place *numbers, const float *steps,
            int bits, const int32_t *weights, int others, const uint8_t **low, const uint8_t **high,
            const int32_t **checksums, bool limited, int width, void *sums, bool *right, double *variance) {
    float padded[BLOCK];
    int32_t n[BLOCK], m[BLOCK], total[BLOCK], lows[BLOCK], highs[BLOCK], rest, members = others + 1;
    int32_t largest = (int32_t)(UINT32_C(0xFFFFFFFF) >> (33 - width));
    bool unequal = false;
    for (place block = begin; block < end; block++) {
        whole_steps(row_of(vector, length, numbers[block], padded, &rest), steps[block], n);
        bool held = steps[block] > 0;
        int64_t squares = 0, one, sum = 0;
        EACH total[i] = lows[i] = highs[i] = 0;
        for (int other = 0; other < others; other++) {
            int32_t theirs = checksums[other][block] - rest;
            held &= differences(bits, low[other], high[other], block, n, weights, theirs, m, &unequal, &one);
            squares += one;
            EACH {
                total[i] += m[i];
                lows[i] = m[i] < lows[i] ? m[i] : lows[i];
                highs[i] = m[i] > highs[i] ? m[i] : highs[i];
            }
        }
        int32_t most = INT_MIN, least = INT_MAX, greatest = INT_MIN, smallest = INT_MAX;
        EACH {
            int32_t up = total[i] - members * lows[i], down = total[i] - members * highs[i];
            most = up > most ? up : most;
            least = down < least ? down : least;
            greatest = n[i] > greatest ? n[i] : greatest;
            smallest = n[i] < smallest ? n[i] : smallest;
            sum += (int64_t)total[i] * total[i];
        }
        held &= most <= largest && least >= -largest;
        if (held) *variance += (double)steps[block] * steps[block] * (squares - (double)sum / members) / others;
        right[block] = held && (!limited || (greatest < (int32_t)BIG && smallest > -(int32_t)BIG));
        EACH total[i] += members * n[i];
        if (width == 8) EACH((int8_t *)sums)[block * BLOCK + i] = (int8_t)total[i];
        else if (width == 16) EACH((int16_t *)sums)[block * BLOCK + i] = (int16_t)total[i];
        else memcpy((int32_t *)sums + block * BLOCK, total, sizeof total);
    }
    return unequal;
}

/* Fill `out` with the mean of the blocks that are held, from a group's sums; with `rounding`, s * mean(n), and
c - s n. */
void average_sums(place begin, place end, const float *vector, place length, const place *numbers, const float *steps,
                  const bool *held, int width, const void *sums, int members, float *out, float *rounding) {
    float padded[BLOCK];
    int32_t n[BLOCK], m[BLOCK], rest;
    for (place block = begin; block < end; block++) {
        if (!held[block]) continue;
        const float *row = row_of(vector, length, numbers[block], padded, &rest);
        float step = steps[block], *mean = out + numbers[block] * BLOCK;
        int size = elements_of(length, numbers[block]);
        whole_steps(row, step, n);
        if (width == 8) EACH m[i] = (int8_t)(((const int8_t *)sums)[block * BLOCK + i] - members * n[i]);
        else if (width == 16) EACH m[i] = (int16_t)(((const int16_t *)sums)[block * BLOCK + i] - members * n[i]);
        else EACH m[i] = ((const int32_t *)sums)[block * BLOCK + i] - members * n[i];
        if (rounding) {
            double scale = (double)step / members;
            float *left = rounding + numbers[block] * BLOCK;
#pragma GCC ivdep
            for (int i = 0; i < size; i++) {
                left[i] = row[i] - (float)n[i] * step;
                mean[i] = (float)(((double)n[i] * members + m[i]) * scale);
            }
        } else {
            float scale = step / (float)members;
#pragma GCC ivdep
            for (int i = 0; i < size; i++) mean[i] = (float)m[i] * scale + row[i];
        }
    }
}

/* c, see `step.combine`; with `kept`, the rounding errors, which may be NULL. `out` may be theta. */
void combine(place begin, place end, const float *theta, const float *phi, const float *kept, float beta, float pull,
             float *out) {
#pragma GCC ivdep
    for (place i = begin; i < end; i++) {
        float c = theta[i] * beta;
        if (pull != 0) c += phi[i] * pull;
        out[i] = kept ? c + kept[i] : c;
    }
}

/* See `host_kernels.outer_step`, whose tensors are NULL if they are None. */
void outer_step(place begin, place end, const float *mean, float *phi, float *delta, float *snapshot, float *theta,
                float alpha, float gamma, bool nesterov) {
    for (place start = begin; start < end; start += BLOCK) {
        place stop = end < start + BLOCK ? end : start + BLOCK;
        for (place i = start; i < stop; i++) {
            float u = phi[i] * -gamma + mean[i], new = (delta ? delta[i] : 0) * alpha + u;
            if (delta) delta[i] = new;
            phi[i] += nesterov ? u + new * alpha : new;
        }
        for (place i = start; snapshot && i < stop; i++) snapshot[i] = phi[i] - snapshot[i];
        if (theta) memcpy(theta + start, phi + start, (stop - start) * sizeof(float));
    }
}

/* Return the sum of squares of the difference of two vectors. */
double squared_distance(place begin, place end, const float *one, const float *two) {
    double total = 0;
    for (place start = begin; start < end; start += BLOCK) {
        float lanes[32] = {0};
        place i = start, stop = end < start + BLOCK ? end : start + BLOCK;
        for (; i + 32 <= stop; i += 32)
            for (int lane = 0; lane < 32; lane++) {
                float apart = one[i + lane] - two[i + lane];
                lanes[lane] += apart * apart;
            }
        for (; i < stop; i++) lanes[0] += (one[i] - two[i]) * (one[i] - two[i]);
        for (int lane = 0; lane < 32; lane++) total += lanes[lane];
    }
    return total;
}

/* The mean of two vectors; `out` may be one of them. */
void halve(place begin, place end, const float *one, const float *two, float *out) {
#pragma GCC ivdep
    for (place i = begin; i < end; i++) out[i] = (one[i] + two[i]) * 0.5f;
}

/* Fill `out`, none of them, with the mean of vectors; return the sum of the squares of their differences to it. */
double mean_of_group(place begin, place end, int members, const float **vectors, float *out) {
    double total = 0;
    for (place start = begin; start < end; start += BLOCK) {
        int size = end - start < BLOCK ? (int)(end - start) : BLOCK;
        float mean[BLOCK], squares[BLOCK] = {0};
        memcpy(mean, vectors[0] + start, size * sizeof(float));
        for (int member = 1; member < members; member++)
            for (int i = 0; i < size; i++) mean[i] += vectors[member][start + i];
        for (int i = 0; i < size; i++) mean[i] /= members;
        for (int member = 0; member < members; member++)
            for (int i = 0; i < size; i++) {
                float apart = vectors[member][start + i] - mean[i];
                squares[i] += apart * apart;
            }
        for (int width = BLOCK / 2; width; width /= 2)
            for (int i = 0; i < width; i++) squares[i] += squares[i + width];
        total += squares[0];
        memcpy(out + start, mean, size * sizeof(float));
    }
    return total;
}
