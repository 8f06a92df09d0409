/* Philox against published vectors; distributions; and that a shard draws its slice of the whole.
 */
/* build: double */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/unit.h"

/* ---------------------------------------------------------------- generator */

/* Salmon et al. 2011, "Random123" known answers of philox4x32-10. Counter words 0 and 1 are the
 * position, 2 and 3 the stream. */
static void philox_gives_the_known_answers(void **state) {
    static const struct {
        uint64_t key, stream, position;
        uint32_t out[4];
    } rows[] = {
        {0, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
        {UINT64_MAX, UINT64_MAX, UINT64_MAX, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
        {0x299f31d0a4093822u,
         0x0370734413198a2eu,
         0x85a308d3243f6a88u,
         {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}};
    uint32_t out[4];
    int i, w;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tshi_rng_philox(rows[i].key, rows[i].stream, rows[i].position, out);
        for (w = 0; w < 4; w++) assert_int_equal(out[w], rows[i].out[w]);
    }
}

static void element_e_is_lane_e_of_its_block(void **state) {
    uint32_t out[4];
    uint64_t e;
    (void)state;
    for (e = 0; e < 64; e++) {
        tshi_rng_philox(7, 11, e / 4, out);
        assert_int_equal(tshi_rng_bits(7, 11, e), out[e % 4]);
        EXPECT_NEAR(tshi_rng_uniform(7, 11, e), (double)(out[e % 4] >> 8) / 16777216.0, 0);
    }
}

/* ------------------------------------------------------------- distributions */

enum { DRAWS = 1 << 16 };

/* Moments of DRAWS numbers: tolerances are 5 standard deviations of the moment. */
static void uniform_is_uniform(void **state) {
    double sum = 0, squares = 0, least = 1, most = 0;
    int e;
    (void)state;
    for (e = 0; e < DRAWS; e++) {
        double u = tshi_rng_uniform(1, 2, (uint64_t)e);
        sum += u;
        squares += (u - 0.5) * (u - 0.5);
        if (u < least) least = u;
        if (u > most) most = u;
    }
    assert_true(least >= 0 && least < 1e-3 && most < 1 && most > 1 - 1e-3);
    EXPECT_NEAR(sum / DRAWS, 0.5, 5 * sqrt(1 / 12.0 / DRAWS));
    EXPECT_NEAR(squares / DRAWS, 1 / 12.0, 5 * sqrt(1 / 180.0 / DRAWS));
}

static void normal_is_normal(void **state) {
    double moment[5] = {0, 0, 0, 0, 0}, beyond = 0, pairs = 0, last = 0;
    int e, k;
    (void)state;
    for (e = 0; e < DRAWS; e++) {
        double x = tshi_rng_normal(3, 4, (uint64_t)e), power = 1;
        for (k = 0; k < 5; k++, power *= x) moment[k] += power / DRAWS;
        beyond += fabs(x) > 1.959963985 ? 1.0 / DRAWS : 0;
        pairs += x * last / DRAWS;
        last = x;
    }
    EXPECT_NEAR(moment[1], 0, 5 * sqrt(1.0 / DRAWS));
    EXPECT_NEAR(moment[2], 1, 5 * sqrt(2.0 / DRAWS));
    EXPECT_NEAR(moment[3], 0, 5 * sqrt(15.0 / DRAWS));
    EXPECT_NEAR(moment[4], 3, 5 * sqrt(96.0 / DRAWS));
    EXPECT_NEAR(beyond, 0.05, 5 * sqrt(0.05 * 0.95 / DRAWS));
    EXPECT_NEAR(pairs, 0, 5 * sqrt(1.0 / DRAWS)); /* neighbours share a block, not a number */
}

static void hashes_name_streams_apart(void **state) {
    static const char *const paths[] = {"", "a", "b", "ab", "ba", "h.0.weight", "h.1.weight"};
    uint64_t seen[2 * COUNT(paths)];
    int i, j, n = 0;
    (void)state;
    for (i = 0; i < COUNT(paths); i++) {
        seen[n++] = tshi_rng_hash(0, paths[i], strlen(paths[i]));
        seen[n++] = tshi_rng_hash(1, paths[i], strlen(paths[i]));
        assert_int_equal(seen[n - 2], tshi_rng_hash(0, paths[i], strlen(paths[i])));
    }
    for (i = 0; i < n; i++)
        for (j = 0; j < i; j++) assert_true(seen[i] != seen[j]);
    /* parts hash as the whole only through `hash`, never by accident */
    assert_true(tshi_rng_hash(tshi_rng_hash(0, "a", 1), "b", 1) != tshi_rng_hash(0, "ab", 2));
}

/* -------------------------------------------------------------------- tensors */

static void randn_is_keyed_by_seed_and_count(void **state) {
    tsh_desc desc = {.seed = 5};
    tsh_ctx *ctx = unit_open(&desc), *other = unit_open(&desc);
    tsh_tensor *a = tsh_randn(ctx, tsh_shape2(3, 5)), *b = tsh_randn(ctx, tsh_shape2(3, 5));
    uint64_t first = tsh_hash(ctx, a), second = tsh_hash(ctx, b);
    (void)state;
    assert_true(first != second);
    assert_true(first == tsh_hash(other, tsh_randn(other, tsh_shape2(3, 5))));
    assert_true(second == tsh_hash(other, tsh_randn(other, tsh_shape1(15))));
    unit_close(other);
    desc.seed = 6;
    other = unit_open(&desc);
    assert_true(first != tsh_hash(other, tsh_randn(other, tsh_shape2(3, 5))));
    unit_close(other);
    unit_close(ctx);
}

/* Which initial values, and what element e must be. */
typedef struct draw {
    tsh_init init;
    tsh_style style;
    int segments, unit;
} draw;

static double expected(const draw *d, uint64_t seed, int64_t e) {
    static const char path[] = "layer.weight";
    uint64_t stream = tshi_rng_hash(0, path, sizeof path - 1);
    double bound = sqrt(6.0 / ((1 + d->init.a * d->init.a) * 5)); /* fan_in is global: 5 */
    switch (d->init.kind) {
    case TSH_INIT_ZEROS: return 0;
    case TSH_INIT_ONES: return 1;
    case TSH_INIT_CONSTANT: return d->init.a;
    case TSH_INIT_UNIFORM:
        return d->init.a + (d->init.b - d->init.a) * tshi_rng_uniform(seed, stream, (uint64_t)e);
    case TSH_INIT_NORMAL: return d->init.a + d->init.b * tshi_rng_normal(seed, stream, (uint64_t)e);
    case TSH_INIT_KAIMING_UNIFORM:
        return -bound + 2 * bound * tshi_rng_uniform(seed, stream, (uint64_t)e);
    default: break; /* see test_init.c */
    }
    return (double)NAN;
}

/* Each rank's piece of a weight (12, 5) is that slice of what one device would draw. */
static int draws_its_slice(tsh_ctx *ctx, void *user) {
    const draw *d = (const draw *)user;
    tsh_linear_desc desc = {.in = 5, .out = 12, .bias = TSH_NO, .weight_init = d->init};
    tsh_module *layer;
    tsh_tensor *w;
    tsh_layout layout;
    tsh_range range[TSH_MAX_SEGMENTS];
    const tsh_real *at;
    int64_t row, column;
    int s;
    desc.style = d->style;
    desc.segments = d->segments;
    desc.unit = d->unit;
    layer = tsh_add_linear(tsh_root(ctx), "layer", &desc);
    w = tsh_param(layer, "weight");
    CHECK(tsh_materialize(layer) == TSH_OK, "materialize");
    layout = tsh_layout_of(w);
    at = (const tsh_real *)tsh_data(ctx, w);
    (void)tsh_shard_range(layout, tsh_size(w, layout.dim), tsh_tp(ctx)->size, tsh_tp(ctx)->rank,
                          range);
    if (d->style == TSH_ROWWISE) { /* one segment of columns */
        for (row = 0; row < 12; row++)
            for (column = 0; column < range[0].length; column++, at++)
                CHECK(*at == (tsh_real)expected(d, 9, row * 5 + range[0].start + column),
                      "element (%d, %d)", (int)row, (int)column);
    } else {
        for (s = 0; s < layout.segments; s++)
            for (row = 0; row < range[s].length; row++)
                for (column = 0; column < 5; column++, at++)
                    CHECK(*at == (tsh_real)expected(d, 9, (range[s].start + row) * 5 + column),
                          "segment %d, element (%d, %d)", s, (int)row, (int)column);
    }
    CHECK_OK();
    return 0;
}

static void shards_draw_their_slice_of_the_whole(void **state) {
    static const draw draws[] = {
        {{.kind = TSH_INIT_NORMAL, .a = 1, .b = 0.5}, TSH_COLWISE, 1, 1},
        {{.kind = TSH_INIT_NORMAL, .a = 0, .b = 2}, TSH_COLWISE, 3, 2},
        {{.kind = TSH_INIT_NORMAL, .a = 0, .b = 1}, TSH_ROWWISE, 1, 1},
        {{.kind = TSH_INIT_UNIFORM, .a = -2, .b = 3}, TSH_COLWISE, 2, 1},
        {{.kind = TSH_INIT_KAIMING_UNIFORM, .a = 2, .b = 0}, TSH_ROWWISE, 1, 5},
        {{.kind = TSH_INIT_KAIMING_UNIFORM, .a = 0, .b = 0}, TSH_COLWISE, 4, 1},
        {{.kind = TSH_INIT_CONSTANT, .a = 7, .b = 0}, TSH_ROWWISE, 1, 1},
        {{.kind = TSH_INIT_ONES, .a = 0, .b = 0}, TSH_COLWISE, 1, 1},
        {{.kind = TSH_INIT_ZEROS, .a = 0, .b = 0}, TSH_COLWISE, 1, 1},
    };
    tsh_desc desc = {.seed = 9};
    int i, p;
    (void)state;
    for (i = 0; i < COUNT(draws); i++)
        for (p = 0; p < COUNT(ranks_degrees); p++) {
            draw d = draws[i];
            ranks_run_with(ranks_degrees[p], &desc, draws_its_slice, &d);
        }
}

/* ---------------------------------------------------------------------- state */

/* What the next step draws: two masks of modules, one of the ctx, values, initial values. */
static int draw_step(tsh_ctx *ctx, uint64_t hash[5]) {
    tsh_module *root = tsh_root(ctx);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(6, 10)), *own;
    own = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(3, 4), tsh_replicated());
    hash[0] = tsh_hash(ctx, tsh_forward(tsh_find(root, "a.drop"), x));
    hash[1] = tsh_hash(ctx, tsh_forward(tsh_find(root, "b"), tsh_redistribute(x, tsh_sharded(1))));
    hash[2] = tsh_hash(ctx, tsh_dropout(x, 0.5, NULL));
    hash[3] = tsh_hash(ctx, tsh_randn(ctx, tsh_shape1(7)));
    (void)tsh_init_normal(own, NULL);
    hash[4] = tsh_hash(ctx, own);
    tsh_tensor_free(own);
    CHECK(tsh_step_end(ctx) == TSH_OK, "a step");
    return 0;
}

enum { STATE = (5 + 4) * 8 };

static int replays(tsh_ctx *ctx, void *user) {
    tsh_module *root = tsh_root(ctx), *a = tsh_add_module(root, "a", NULL);
    unsigned char state[STATE], other[STATE], first[STATE + 8];
    uint64_t want[3][5], got[5];
    int step, i;
    (void)user;
    CHECK(tsh_add_dropout(a, "drop", 0.5) && tsh_add_dropout(root, "b", 0.25), "modules");
    CHECK(tsh_rng_state(ctx, NULL, 0) == STATE, "its size");
    memset(first, 0xA5, sizeof first);
    CHECK(tsh_rng_state(ctx, first, STATE - 1) == STATE && first[0] == 0xA5, "too small");
    CHECK(tsh_rng_state(ctx, first, sizeof first) == STATE && first[STATE] == 0xA5, "large");
    for (step = 0; step < 2; step++)
        if (draw_step(ctx, got)) return 1;
    CHECK(tsh_rng_state(ctx, state, sizeof state) == STATE, "written");
    for (step = 0; step < 3; step++)
        if (draw_step(ctx, want[step])) return 1;
    for (i = 0; i < 5; i++)
        CHECK(want[0][i] != want[1][i] && want[0][i] != got[i], "draw %d repeats", i);
    CHECK(tsh_set_rng_state(ctx, state, sizeof state) == TSH_OK, "restored");
    CHECK(tsh_rng_state(ctx, other, sizeof other) == STATE && !memcmp(state, other, STATE), "same");
    for (step = 0; step < 3; step++) {
        if (draw_step(ctx, got)) return 1;
        CHECK(memcmp(got, want[step], sizeof got) == 0, "step %d", step);
    }
    return 0;
}

static void a_restored_state_replays(void **state) {
    tsh_desc desc = {.seed = 77};
    int i;
    (void)state;
    for (i = 0; i < COUNT(ranks_degrees); i++)
        ranks_run_with(ranks_degrees[i], &desc, replays, NULL);
}

/* The format, byte for byte; it is the seed's as well: another ctx goes on with it. */
static void the_state_is_little_endian_words(void **state) {
    static const unsigned char want[] = {'t', 's', 'h', 'r', 'n', 'g', '0', '1', 2, 0, 0, 0, 0, 0,
                                         0,   0,   8,   7,   6,   5,   4,   3,   2, 1, 1, 0, 0, 0,
                                         0,   0,   0,   0,   0,   0,   0,   0,   0, 0, 0, 0, 0, 0,
                                         0,   0,   0,   0,   0,   0,   2,   0,   0, 0, 0, 0, 0, 0};
    tsh_desc desc = {.seed = 0x0102030405060708u}, another = {.seed = 1};
    tsh_ctx *ctx = unit_open(&desc), *next = unit_open(&another);
    tsh_module *drop = tsh_add_dropout(tsh_root(ctx), "drop", 0.5);
    unsigned char got[sizeof want];
    uint64_t hash;
    (void)state;
    (void)tsh_randn(ctx, tsh_shape1(2));
    (void)tsh_forward(drop, tsh_forward(drop, tsh_ones(ctx, tsh_shape1(3))));
    assert_int_equal(tsh_rng_state(ctx, got, sizeof got), sizeof want);
    assert_memory_equal(got, want, sizeof want);
    hash = tsh_hash(ctx, tsh_forward(drop, tsh_ones(ctx, tsh_shape1(99))));
    drop = tsh_add_dropout(tsh_root(next), "drop", 0.5);
    assert_int_equal(tsh_set_rng_state(next, want, sizeof want), TSH_OK);
    assert_true(hash == tsh_hash(next, tsh_forward(drop, tsh_ones(next, tsh_shape1(99)))));
    unit_close(next);
    unit_close(ctx);
}

static void a_strange_state_is_refused(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    unsigned char bytes[64], now[64];
    size_t n = tsh_rng_state(ctx, bytes, sizeof bytes);
    (void)state;
    assert_int_equal(n, 48); /* the root alone */
    bytes[16] = 9;
    bytes[0] = 'T';
    assert_int_equal(tsh_set_rng_state(ctx, bytes, n), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "48 bytes are no state");
    bytes[0] = 't';
    assert_int_equal(tsh_set_rng_state(ctx, bytes, 39), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "39 bytes are no state");
    assert_int_equal(tsh_set_rng_state(ctx, NULL, n), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "0 bytes are no state");
    assert_int_equal(tsh_set_rng_state(ctx, bytes, 56), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "is of 1 modules and has 56 bytes");
    assert_int_equal(tsh_set_rng_state(ctx, bytes, 49), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "has 49 bytes");
    assert_non_null(tsh_add_dropout(tsh_root(ctx), "drop", 0.5));
    assert_int_equal(tsh_set_rng_state(ctx, bytes, n), TSH_ERR_ARGUMENT);
    EXPECT(TSH_ERR_ARGUMENT, "this tree has 2 modules, whose state has 56");
    assert_int_equal(tsh_rng_state(ctx, now, sizeof now), 56);
    assert_int_equal(now[16], 0); /* nothing was changed */
    assert_int_equal(tsh_rng_state(NULL, now, sizeof now), 0);
    assert_int_equal(tsh_set_rng_state(NULL, now, sizeof now), TSH_ERR_ARGUMENT);
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_known_answers),
        cmocka_unit_test(element_e_is_lane_e_of_its_block),
        cmocka_unit_test(uniform_is_uniform),
        cmocka_unit_test(normal_is_normal),
        cmocka_unit_test(hashes_name_streams_apart),
        cmocka_unit_test(randn_is_keyed_by_seed_and_count),
        cmocka_unit_test(shards_draw_their_slice_of_the_whole),
        cmocka_unit_test(a_restored_state_replays),
        cmocka_unit_test(the_state_is_little_endian_words),
        cmocka_unit_test(a_strange_state_is_refused),
    };
    return cmocka_run_group_tests_name("unit/rng", tests, NULL, NULL);
}
