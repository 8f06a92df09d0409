/* The ownership function against its formula, and layouts as values and text. */
#include "../../tshard.h"
#include "../support/unit.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

/* torch.chunk's rule in units: how many of n units rank owns. */
static int64_t chunk_units(int64_t n, int size, int rank) {
    int64_t c = n / size + (n % size > 0), from = c * rank, to = from + c;
    return (to < n ? to : n) - (from < n ? from : n);
}

/* Every segment is partitioned by the ranks, in order, in pieces of the formula's size. */
static void check_partition(const tsh_layout *layout, const int64_t *lengths, const int64_t *units,
                            int segments, int64_t length, int size) {
    int64_t next[TSH_MAX_SEGMENTS], start = 0, owned;
    tsh_range ranges[TSH_MAX_SEGMENTS];
    int rank, s;
    for (s = 0; s < segments; start += lengths[s++]) next[s] = start;
    assert_int_equal(start, length);
    for (rank = 0; rank < size; rank++) {
        for (owned = 0, s = 0; s < segments; s++)
            owned += chunk_units(lengths[s] / units[s], size, rank) * units[s];
        assert_int_equal(tsh_shard_range(*layout, length, size, rank, ranges), owned);
        assert_int_equal(tsh_shard_range(*layout, length, size, rank, NULL), owned);
        for (s = 0; s < segments; s++) {
            assert_int_equal(ranges[s].start, next[s]);
            assert_int_equal(ranges[s].length,
                             chunk_units(lengths[s] / units[s], size, rank) * units[s]);
            next[s] += ranges[s].length;
        }
    }
    for (start = 0, s = 0; s < segments; s++) {
        start += lengths[s];
        assert_int_equal(next[s], start);
    }
}

static void equal_segments_are_cut_in_units(void **state) {
    static const int sizes[] = {1, 2, 3, 4, 5, 7, 8, 64};
    static const int64_t units[] = {1, 2, 3, 5, 64};
    int64_t length;
    int i, u, n, s;
    (void)state;
    for (length = 0; length <= 132; length++)
        for (i = 0; i < COUNT(sizes); i++)
            for (u = 0; u < COUNT(units); u++)
                for (n = 1; n <= TSH_MAX_SEGMENTS; n++) {
                    tsh_layout layout = tsh_shard_segments(0, n, units[u]);
                    int64_t lengths[TSH_MAX_SEGMENTS], unit[TSH_MAX_SEGMENTS];
                    for (s = 0; s < n; s++) lengths[s] = length / n;
                    for (s = 0; s < n; s++) unit[s] = units[u];
                    if (length % n || length / n % units[u])
                        assert_int_equal(tsh_shard_range(layout, length, sizes[i], 0, NULL), -1);
                    else
                        check_partition(&layout, lengths, unit, n, length, sizes[i]);
                }
}

/* [Q|K|V] of 6 query and 2 key and value heads of 4, an empty segment, and one uncut. */
static void segments_may_differ(void **state) {
    static const int64_t lengths[] = {24, 8, 0, 9}, units[] = {4, 4, 1, 9};
    tsh_layout layout = tsh_shard_segments(0, 4, 1);
    int size, s;
    (void)state;
    for (s = 0; s < 4; s++) layout.segment[s].length = lengths[s];
    for (s = 0; s < 4; s++) layout.segment[s].unit = units[s];
    for (size = 1; size <= 8; size++) check_partition(&layout, lengths, units, 4, 41, size);
}

static void known_cuts(void **state) {
    static const struct {
        int64_t length, unit;
        int size;
        int64_t owned[8];
    } rows[] = {{50257, 1, 4, {12565, 12565, 12565, 12562}}, /* torch.arange(50257).chunk(4) */
                {4, 1, 3, {2, 2, 0}},                        /* heads */
                {256, 64, 3, {128, 128, 0}},                 /* the same with their elements */
                {3, 1, 2, {2, 1}},
                {2, 1, 8, {1, 1, 0, 0, 0, 0, 0, 0}},
                {10, 5, 4, {5, 5, 0, 0}},
                {9, 1, 4, {3, 3, 3, 0}}}; /* torch.chunk gives three pieces only */
    int i, rank;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tsh_layout layout = tsh_shard_units(0, rows[i].unit);
        for (rank = 0; rank < rows[i].size; rank++)
            assert_int_equal(tsh_shard_range(layout, rows[i].length, rows[i].size, rank, NULL),
                             rows[i].owned[rank]);
    }
}

static void replicated_and_partial_own_everything(void **state) {
    tsh_layout layouts[2];
    tsh_range ranges[TSH_MAX_SEGMENTS];
    int i, rank;
    (void)state;
    layouts[0] = tsh_replicated();
    layouts[1] = tsh_partial();
    for (i = 0; i < 2; i++)
        for (rank = 0; rank < 3; rank++) {
            assert_int_equal(tsh_shard_range(layouts[i], 7, 3, rank, ranges), 7);
            assert_int_equal(ranges[0].start, 0);
            assert_int_equal(ranges[0].length, 7);
            assert_int_equal(tsh_shard_range(layouts[i], 0, 3, rank, NULL), 0);
        }
}

static void zeros_of_a_description_are_defaults(void **state) {
    tsh_layout layout = tsh_replicated();
    (void)state;
    layout.kind = TSH_SHARDED; /* dim 0, one segment of everything, unit 1 */
    assert_int_equal(tsh_shard_range(layout, 7, 2, 0, NULL), 4);
    assert_int_equal(tsh_shard_range(layout, 7, 2, 1, NULL), 3);
}

static void what_does_not_fit_is_minus_one(void **state) {
    tsh_layout plain = tsh_sharded(0), layout;
    (void)state;
    assert_int_equal(tsh_shard_range(plain, -1, 2, 0, NULL), -1);
    assert_int_equal(tsh_shard_range(plain, 4, 0, 0, NULL), -1);
    assert_int_equal(tsh_shard_range(plain, 4, 2, -1, NULL), -1);
    assert_int_equal(tsh_shard_range(plain, 4, 2, 2, NULL), -1);
    layout = tsh_shard_units(0, 3);
    assert_int_equal(tsh_shard_range(layout, 10, 2, 0, NULL), -1);
    layout = tsh_shard_units(0, -1);
    assert_int_equal(tsh_shard_range(layout, 4, 2, 0, NULL), -1);
    layout = tsh_shard_segments(0, TSH_MAX_SEGMENTS + 1, 1);
    assert_int_equal(tsh_shard_range(layout, 10, 2, 0, NULL), -1);
    layout = tsh_shard_segments(0, -1, 1);
    assert_int_equal(tsh_shard_range(layout, 0, 2, 0, NULL), -1);
    layout = tsh_shard_segments(0, 2, 1); /* 3 + 4 is not 8; nor do lengths go below 0 */
    layout.segment[0].length = 3;
    layout.segment[1].length = 4;
    assert_int_equal(tsh_shard_range(layout, 8, 2, 0, NULL), -1);
    assert_int_equal(tsh_shard_range(layout, 7, 2, 0, NULL), 4);
    layout.segment[1].length = -3;
    assert_int_equal(tsh_shard_range(layout, 0, 2, 0, NULL), -1);
}

static void makers_make(void **state) {
    tsh_layout layout = tsh_replicated();
    (void)state;
    assert_int_equal(layout.kind, TSH_REPLICATED);
    layout = tsh_partial();
    assert_int_equal(layout.kind, TSH_PARTIAL);
    layout = tsh_sharded(-2);
    assert_int_equal(layout.kind, TSH_SHARDED);
    assert_int_equal(layout.dim, -2);
    layout = tsh_shard_units(3, 64);
    assert_int_equal(layout.dim, 3);
    assert_true(layout.segments == 0 || layout.segments == 1);
    assert_int_equal(layout.segment[0].unit, 64);
    layout = tsh_shard_segments(1, 3, 16);
    assert_int_equal(layout.segments, 3);
    assert_int_equal(layout.segment[2].unit, 16);
    assert_int_equal(layout.segment[2].length, 0);
}

static void expect_layout_text(tsh_layout layout, const char *want) {
    char text[64];
    assert_ptr_equal(tsh_layout_text(layout, text, sizeof text), text);
    assert_string_equal(text, want);
}

static void layouts_have_text(void **state) {
    tsh_layout layout = tsh_shard_segments(1, 3, 64);
    char text[8] = "before";
    (void)state;
    expect_layout_text(tsh_replicated(), "R");
    expect_layout_text(tsh_partial(), "P");
    expect_layout_text(tsh_sharded(1), "S(1)");
    expect_layout_text(tsh_sharded(-1), "S(-1)");
    expect_layout_text(tsh_shard_units(0, 64), "S(0, unit 64)");
    expect_layout_text(tsh_shard_segments(0, 2, 1), "S(0, 2 segments)");
    expect_layout_text(layout, "S(1, 3 segments, unit 64)");
    assert_string_equal(tsh_layout_text(layout, text, 5), "S(1,");
    assert_string_equal(tsh_layout_text(layout, text, 1), "");
    text[0] = 'x';
    assert_ptr_equal(tsh_layout_text(layout, text, 0), text);
    assert_int_equal(text[0], 'x');
}

/* On a tensor every default is filled in. */
static void a_tensor_s_layout_is_resolved(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_layout layout = tsh_shard_segments(-1, 3, 0);
    tsh_tensor *t = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 12), layout);
    (void)state;
    layout = tsh_layout_of(t);
    assert_int_equal(layout.kind, TSH_SHARDED);
    assert_int_equal(layout.dim, 1);
    assert_int_equal(layout.segments, 3);
    assert_int_equal(layout.segment[2].length, 4);
    assert_int_equal(layout.segment[2].unit, 1);
    unit_close(ctx);
}

static void a_tensor_takes_only_layouts_that_fit(void **state) {
    static const char *const texts[] = {"S(2)", "S(-3)", "S(1, unit 5)", "S(1, 5 segments)"};
    tsh_ctx *ctx = unit_open(NULL);
    tsh_layout layouts[4];
    int i;
    (void)state;
    layouts[0] = tsh_sharded(2);
    layouts[1] = tsh_sharded(-3);
    layouts[2] = tsh_shard_units(1, 5);
    layouts[3] = tsh_shard_segments(1, 5, 1);
    for (i = 0; i < 4; i++) {
        assert_null(tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(2, 12), layouts[i]));
        EXPECT(TSH_ERR_LAYOUT, texts[i]);
    }
    unit_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_segments_are_cut_in_units),
        cmocka_unit_test(segments_may_differ),
        cmocka_unit_test(known_cuts),
        cmocka_unit_test(replicated_and_partial_own_everything),
        cmocka_unit_test(zeros_of_a_description_are_defaults),
        cmocka_unit_test(what_does_not_fit_is_minus_one),
        cmocka_unit_test(makers_make),
        cmocka_unit_test(layouts_have_text),
        cmocka_unit_test(a_tensor_s_layout_is_resolved),
        cmocka_unit_test(a_tensor_takes_only_layouts_that_fit),
    };
    return cmocka_run_group_tests_name("unit/layout", tests, NULL, NULL);
}
