/* Results, the first error, opening and closing, groups of ranks, the allocator's contract. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/ranks.h"
#include "../support/logs.h"
#include "../support/unit.h"

/* ------------------------------------------------------------------- results */

static void every_result_has_a_name_and_a_sentence(void **state) {
    static const struct {
        tsh_result code;
        const char *name, *text;
    } rows[] = {{TSH_OK, "TSH_OK", "no error"},
                {TSH_ERR_ARGUMENT, "TSH_ERR_ARGUMENT", "an argument is not valid"},
                {TSH_ERR_SHAPE, "TSH_ERR_SHAPE", "shapes do not fit"},
                {TSH_ERR_LAYOUT, "TSH_ERR_LAYOUT", "layouts do not fit"},
                {TSH_ERR_DTYPE, "TSH_ERR_DTYPE", "a dtype is not the one expected"},
                {TSH_ERR_MEMORY, "TSH_ERR_MEMORY", "the allocator returned NULL"},
                {TSH_ERR_STALE, "TSH_ERR_STALE", "the tensor's values were given back"},
                {TSH_ERR_STATE, "TSH_ERR_STATE", "the call is not possible now"},
                {TSH_ERR_MISMATCH, "TSH_ERR_MISMATCH", "ranks called different collectives"},
                {TSH_ERR_LOST, "TSH_ERR_LOST", "a rank is gone"},
                {TSH_ERR_TIMEOUT, "TSH_ERR_TIMEOUT", "a collective ran out of time"},
                {TSH_ERR_ABORTED, "TSH_ERR_ABORTED", "a rank aborted the world"},
                {TSH_ERR_IO, "TSH_ERR_IO", "the system refused"},
                {TSH_ERR_UNSUPPORTED, "TSH_ERR_UNSUPPORTED", "the backend does not do this"},
                {TSH_ERR_ANOMALY, "TSH_ERR_ANOMALY", "a value is NaN or infinite"}};
    int i;
    (void)state;
    assert_int_equal(COUNT(rows), TSH_RESULT_COUNT);
    for (i = 0; i < COUNT(rows); i++) {
        assert_int_equal(rows[i].code, i);
        assert_string_equal(tsh_result_name(rows[i].code), rows[i].name);
        assert_string_equal(tsh_result_text(rows[i].code), rows[i].text);
    }
    assert_string_equal(tsh_result_name(TSH_RESULT_COUNT), "TSH_?");
    assert_string_equal(tsh_result_text(TSH_RESULT_COUNT), "not an error code");
}

static void the_version_is_that_of_the_macros(void **state) {
    char text[64];
    (void)state;
    (void)snprintf(text, sizeof text, "%d.%d.%d", TSHARD_VERSION_MAJOR, TSHARD_VERSION_MINOR,
                   TSHARD_VERSION_PATCH);
    assert_string_equal(TSHARD_VERSION, text);
    assert_string_equal(tsh_version(), text);
}

static void dtypes_have_sizes(void **state) {
    (void)state;
    assert_int_equal(tsh_dtype_size(TSH_F32), 4);
    assert_int_equal(tsh_dtype_size(TSH_F64), 8);
    assert_int_equal(tsh_dtype_size(TSH_I32), 4);
    assert_int_equal(tsh_dtype_size(TSH_I64), 8);
    assert_int_equal(tsh_dtype_size(TSH_REAL), sizeof(tsh_real));
}

/* -------------------------------------------------------------------- errors */

static void the_first_error_is_kept(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    assert_int_equal(tsh_ok(ctx), 1);
    assert_int_equal(tsh_last_error(ctx)->code, TSH_OK);
    assert_string_equal(tsh_last_error(ctx)->message, "");
    assert_int_equal(tsh_fail(ctx, TSH_ERR_IO, "%s has %d lines", "a.txt", 7), TSH_ERR_IO);
    assert_int_equal(tsh_fail(ctx, TSH_ERR_SHAPE, "later"), TSH_ERR_SHAPE);
    assert_int_equal(tsh_last_error(ctx)->code, TSH_ERR_IO);
    assert_int_equal(tsh_last_error(ctx)->rank, 0);
    assert_string_equal(tsh_last_error(ctx)->message, "a.txt has 7 lines");
    assert_int_equal(tsh_ok(ctx), 0);
    tsh_close(ctx);
}

static void a_ctx_with_an_error_computes_nothing_until_it_is_cleared(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(3));
    (void)state;
    (void)tsh_fail(ctx, TSH_ERR_STATE, "no");
    assert_null(tsh_ones(ctx, tsh_shape1(3)));
    assert_null(tsh_neg(x));
    assert_null(tsh_data(ctx, x));
    assert_int_equal(tsh_backward(ctx, x), TSH_ERR_STATE);
    assert_null(tsh_add_module(tsh_root(ctx), "a", NULL));
    EXPECT(TSH_ERR_STATE, "no");
    EXPECT_TEXT(tsh_neg(x), "(3) R: -1 -1 -1");
    unit_close(ctx);
}

/* One rank has no peers, so nothing is ever told to them: an error may be cleared at any time. */
static void one_rank_recovers_from_any_error(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    (void)tsh_fail(ctx, TSH_ERR_STATE, "no");
    assert_int_equal(tsh_ok(ctx), 0);
    EXPECT(TSH_ERR_STATE, "no");
    unit_close(ctx);
}

static void long_messages_are_cut(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    (void)state;
    (void)tsh_fail(ctx, TSH_ERR_IO, "%0600d", 1);
    assert_int_equal(strlen(tsh_last_error(ctx)->message), TSH_MESSAGE_SIZE - 1);
    tsh_close(ctx);
}

static void null_for_a_ctx_is_an_error_without_harm(void **state) {
    (void)state;
    assert_int_equal(tsh_fail(NULL, TSH_ERR_IO, "x"), TSH_ERR_IO);
    assert_int_equal(tsh_ok(NULL), 0);
    assert_int_not_equal(tsh_last_error(NULL)->code, TSH_OK);
    assert_true(strlen(tsh_last_error(NULL)->message) > 0);
    tsh_clear_error(NULL);
    tsh_close(NULL);
    assert_int_equal(tsh_step_end(NULL), TSH_ERR_ARGUMENT);
    assert_null(tsh_zeros(NULL, tsh_shape1(1)));
    assert_null(tsh_root(NULL));
    assert_int_equal(tsh_mem_stats(NULL).total, 0);
}

/* Rank 1 fails; the others wait for it in a collective. The barrier: nobody fails before all ranks
 * are open; the verdict may already find the others in it. */
static int a_failing_rank(tsh_ctx *ctx, void *user) {
    const tsh_error *error = tsh_last_error(ctx);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape1(2), tsh_replicated());
    (void)user;
    (void)tsh_barrier(tsh_world(ctx));
    if (tsh_world(ctx)->rank == 1) {
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "wrong by %d", 3);
        CHECK(!tsh_ok(ctx), "told here");
        CHECK(strcmp(error->message, "wrong by 3") == 0, "its own sentence");
    } else {
        CHECK(tsh_broadcast_batch(x) == TSH_ERR_SHAPE, "the verdict");
        CHECK(!tsh_ok(ctx), "the verdict");
        CHECK(strcmp(error->message, "rank 1: wrong by 3") == 0, "the peer's sentence");
    }
    CHECK(error->code == TSH_ERR_SHAPE && error->rank == 1, "one code and rank at fault");
    tsh_clear_error(ctx);
    CHECK(error->code == TSH_ERR_SHAPE, "a verdict stays");
    return 0;
}

static int a_recovering_rank(tsh_ctx *ctx, void *user) {
    (void)user;
    if (tsh_world(ctx)->rank == 1) {
        (void)tsh_fail(ctx, TSH_ERR_SHAPE, "wrong by %d", 3);
        tsh_clear_error(ctx);
    }
    CHECK(tsh_barrier(tsh_world(ctx)) == TSH_OK, "nobody heard of it");
    CHECK_OK();
    return 0;
}

static void an_error_reaches_the_peers_once_told(void **state) {
    (void)state;
    ranks_run(3, a_failing_rank, NULL);
    ranks_run(2, a_recovering_rank, NULL);
}

/* ------------------------------------------------------- opening and closing */

static int add_one(tsh_ctx *ctx, void *user) {
    return tsh_ok(ctx) ? ++*(int *)user : -1;
}

static void a_ctx_of_one_rank_opens_by_default(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_comm *groups[4];
    int i;
    (void)state;
    groups[0] = tsh_world(ctx);
    groups[1] = tsh_tp(ctx);
    groups[2] = tsh_pp(ctx);
    groups[3] = tsh_dp(ctx);
    for (i = 0; i < 4; i++) {
        assert_int_equal(groups[i]->size, 1);
        assert_int_equal(groups[i]->rank, 0);
    }
    unit_close(ctx);
    assert_int_equal(tsh_open(NULL, NULL), TSH_ERR_ARGUMENT);
}

static void run_opens_calls_and_closes(void **state) {
    tsh_desc bad = {.tp = 2};
    int calls = 40;
    (void)state;
    assert_int_equal(tsh_run(NULL, add_one, &calls), 41);
    assert_int_equal(tsh_run(&bad, add_one, &calls), 1);
    assert_int_equal(calls, 41);
}

/* Names in files are anybody's: no error or warning clears a screen or forges a line. */
static void messages_have_no_control_characters(void **state) {
    static const struct {
        const char *foreign, *want;
    } rows[] = {{"a\nllm: all is well", "a?llm: all is well"},
                {"\x1b[2J\x1b]0;x\a", "?[2J?]0;x?"},
                {"tab\t cr\r del\x7f", "tab? cr? del?"},
                {"\xc2\x9b" "2J", "??2J"},                       /* U+009B */
                {"\xe2\x80\xae" "txt", "???txt"},                /* U+202E */
                {"\xe2\x81\xa7\xe2\x80\xa8|", "??????|"},       /* U+2067, U+2028 */
                {"\xc3\xa9\xe2\x82\xac\xe6\xbc\xa2", "\xc3\xa9\xe2\x82\xac\xe6\xbc\xa2"},
                {"\xe2\x80", "\xe2\x80"},
                {"\xc2", "\xc2"}};
    static log_lines log;
    const tsh_desc desc = {.logger = {log_keep, &log}};
    (void)state;
    for (int i = 0; i < COUNT(rows); i++) {
        tsh_error error;
        tsh_ctx *ctx = unit_open(&desc);
        log.count = 0;
        tsh_log_message(&desc.logger, "%s", rows[i].foreign);
        (void)tsh_fail(ctx, TSH_ERR_IO, "%s", rows[i].foreign);
        (void)tsh_error_set(&error, TSH_ERR_IO, 0, "%s", rows[i].foreign);
        assert_string_equal(log.line[0], rows[i].want);
        assert_string_equal(tsh_last_error(ctx)->message, rows[i].want);
        assert_string_equal(error.message, rows[i].want);
        tsh_close(ctx);
    }
}

/* ---------------------------------------------------------------- the logger */

static void an_error_is_logged_once_unless_it_is_cleared_before(void **state) {
    static log_lines log;
    tsh_desc desc = {.logger = {log_keep, &log}};
    tsh_ctx *ctx = unit_open(&desc);
    (void)state;
    log.count = 0;
    (void)tsh_fail(ctx, TSH_ERR_IO, "file %d is missing", 7);
    assert_int_equal(log.count, 0);
    tsh_clear_error(ctx);
    assert_true(tsh_ok(ctx));
    assert_int_equal(log.count, 0);
    (void)tsh_fail(ctx, TSH_ERR_IO, "file %d is missing", 8);
    (void)tsh_fail(ctx, TSH_ERR_IO, "file %d is missing", 9);
    assert_false(tsh_ok(ctx));
    assert_false(tsh_ok(ctx));
    assert_int_not_equal(tsh_step_end(ctx), TSH_OK);
    assert_int_equal(log.count, 1);
    assert_string_equal(log.line[0], "file 8 is missing (TSH_ERR_IO)");
    tsh_clear_error(ctx);
    (void)tsh_slice(tsh_ones(ctx, tsh_shape2(4, 2)), 1, 2, 1);
    tsh_close(ctx); /* the last moment to tell */
    assert_int_equal(log.count, 2);
    assert_string_equal(log.line[1], "tsh_slice: 1 elements from 2 of dimension 1 are outside "
                                     "(4, 2) R (TSH_ERR_SHAPE)");
}

/* Rank 2 of 3 fails. Every rank logs that once, with its own rank in front. */
static int rank_2_fails(tsh_ctx *ctx, void *user) {
    (void)user;
    (void)tsh_barrier(tsh_world(ctx)); /* all ranks are open */
    if (tsh_world(ctx)->rank == 2) (void)tsh_fail(ctx, TSH_ERR_IO, "disk %d is full", 5);
    while (tsh_ok(ctx)) (void)tsh_barrier(tsh_world(ctx));
    return 1;
}

static void each_rank_logs_its_own_error_or_that_of_a_peer(void **state) {
    static log_lines log;
    tsh_desc desc = {.logger = {log_keep, &log}};
    (void)state;
    log.count = 0;
    assert_int_equal(tsh_threads_run(3, &desc, rank_2_fails, NULL), 1);
    assert_int_equal(log.count, 3);
    assert_int_equal(log_holds(&log, "rank 2: disk 5 is full (TSH_ERR_IO)"), 1);
    assert_int_equal(log_holds(&log, "rank 0 stops: rank 2: disk 5 is full (TSH_ERR_IO)"), 1);
    assert_int_equal(log_holds(&log, "rank 1 stops: rank 2: disk 5 is full (TSH_ERR_IO)"), 1);
}

static void a_warning_is_a_message_of_the_logger(void **state) {
    static log_lines log;
    tsh_logger logger = {log_keep, &log}, nowhere = {NULL, NULL};
    char text[2 * TSH_MESSAGE_SIZE];
    (void)state;
    log.count = 0;
    tsh_log_message(NULL, "%d", 1);
    tsh_log_message(&nowhere, "%d", 2);
    tsh_log_message(&logger, "%d of %s", 3, "four");
    assert_int_equal(log.count, 1);
    assert_string_equal(log.line[0], "3 of four");
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    tsh_log_message(&logger, "%s", text);
    assert_int_equal(strlen(log.line[1]), TSH_MESSAGE_SIZE - 1);
}

static void *refuse_all(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    (void)user, (void)ptr, (void)old_size, (void)new_size, (void)align;
    return NULL;
}

/* Whatever keeps tsh_run from calling fn is told in one sentence. */
static void run_says_why_it_did_not_run(void **state) {
    static const char *const lines[] = {
        "tsh_run: fn is NULL",
        "tsh_open: 1 ranks do not divide into tp 3 times pp 1; tp may be 1 (TSH_ERR_ARGUMENT)",
        ("tsh_open: order \"tp-pp\" does not name tp, pp and dp once each, as \"tp-pp-dp\" "
         "(TSH_ERR_ARGUMENT)"),
        "tsh_open: no memory for a ctx (", /* so many bytes) */
        "tsh_open: out is NULL (TSH_ERR_ARGUMENT)"};
    static log_lines log;
    int calls = 0, i;
    tsh_logger logger = {log_keep, &log};
    tsh_desc tp = {.tp = 3, .logger = logger}, order = {.order = "tp-pp", .logger = logger};
    tsh_desc memory = {.allocator = {refuse_all, NULL}, .logger = logger};
    tsh_desc fine = {.logger = logger};
    (void)state;
    log.count = 0;
    assert_int_equal(tsh_run(&fine, NULL, &calls), 1);
    assert_int_equal(tsh_run(NULL, NULL, &calls), 1);
    assert_int_equal(tsh_run(&tp, add_one, &calls), 1);
    assert_int_equal(tsh_run(&order, add_one, &calls), 1);
    assert_int_equal(tsh_run(&memory, add_one, &calls), 1);
    assert_int_equal(tsh_open(&fine, NULL), TSH_ERR_ARGUMENT);
    assert_int_equal(calls, 0);
    assert_int_equal(log.count, COUNT(lines));
    for (i = 0; i < COUNT(lines); i++)
        if (strncmp(log.line[i], lines[i], strlen(lines[i])) != 0) fail_msg("%s", log.line[i]);
    assert_int_equal(tsh_run(&fine, add_one, &calls), 1);
    assert_int_equal(calls, 1);
    assert_int_equal(log.count, 5); /* nothing was wrong */
}

static void expect_refused(const tsh_desc *desc, const char *part) {
    tsh_ctx *ctx;
    assert_int_equal(tsh_open(desc, &ctx), TSH_ERR_ARGUMENT);
    assert_non_null(ctx); /* it tells why */
    if (!strstr(tsh_last_error(ctx)->message, part))
        fail_msg("\"%s\" instead of \"%s\"", tsh_last_error(ctx)->message, part);
    tsh_close(ctx);
}

static void degrees_must_divide_the_ranks(void **state) {
    static const int degrees[][2] = {{2, 0}, {0, 2}, {3, 5}, {-1, 0}, {0, -1}, {65536, 65536}};
    int i;
    char part[96];
    (void)state;
    for (i = 0; i < COUNT(degrees); i++) {
        tsh_desc desc = {.tp = degrees[i][0], .pp = degrees[i][1]};
        (void)snprintf(part, sizeof part, "tsh_open: 1 ranks do not divide into tp %d times pp %d",
                       desc.tp, desc.pp ? desc.pp : 1);
        expect_refused(&desc, part);
    }
}

/* The error lists every degree that would do, of the axis that is to blame. */
static void degrees_that_would_divide_are_listed(void **state) {
    static const struct {
        int ranks, tp, pp;
        const char *sentence;
    } rows[] = {
        {6, 4, 1, "6 ranks do not divide into tp 4 times pp 1; tp may be 1, 2, 3 or 6"},
        {6, 2, 2, "6 ranks do not divide into tp 2 times pp 2; tp may be 1 or 3"},
        {6, 0, 4, "6 ranks do not divide into tp 0 times pp 4; pp may be 1, 2, 3 or 6"},
        {6, 2, 4, "6 ranks do not divide into tp 2 times pp 4; pp may be 1 or 3"},
        {8, 16, 8, "8 ranks do not divide into tp 16 times pp 8; tp may be 1"},
        {7, 2, 0, "7 ranks do not divide into tp 2 times pp 1; tp may be 1 or 7"},
        {4, -1, 0, "4 ranks do not divide into tp -1 times pp 1; tp may be 1, 2 or 4"},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tsh_desc desc = {.tp = rows[i].tp, .pp = rows[i].pp};
        tsh_threads_world *world;
        tsh_ctx *ctx;
        char message[TSH_MESSAGE_SIZE];
        assert_int_equal(tsh_threads_world_new(rows[i].ranks, &world), TSH_OK);
        assert_int_equal(tsh_threads_comm(world, 0, &desc.comm), TSH_OK);
        assert_int_equal(tsh_open(&desc, &ctx), TSH_ERR_ARGUMENT);
        (void)snprintf(message, sizeof message, "tsh_open: %s", rows[i].sentence);
        assert_string_equal(tsh_last_error(ctx)->message, message);
        tsh_close(ctx);
        tsh_threads_world_free(world);
    }
}

static void an_order_names_every_axis_once(void **state) {
    static const char *const bad[] = {"",         "tp",        "tp-pp",     "tp-tp-dp",  "tp-pp-xp",
                                      "tp pp dp", "pp-tp-dp-", "tp-pp-dpx", "tp-pp-dp-x"};
    static const char *const good[] = {"tp-pp-dp", "tp-dp-pp", "pp-tp-dp",
                                       "pp-dp-tp", "dp-tp-pp", "dp-pp-tp"};
    int i;
    (void)state;
    for (i = 0; i < COUNT(bad); i++) {
        tsh_desc desc = {.order = bad[i]};
        expect_refused(&desc, bad[i]);
        expect_refused(&desc, "does not name tp, pp and dp once each");
    }
    for (i = 0; i < COUNT(good); i++) {
        tsh_desc desc = {.order = good[i]};
        unit_close(unit_open(&desc));
    }
}

/* -------------------------------------------------------------------- groups */

typedef struct grid {
    tsh_desc desc;
    int tp[8], pp[8], dp[8]; /* rank in its group, by world rank */
} grid;

static int in_its_groups(tsh_ctx *ctx, void *user) {
    const grid *g = (const grid *)user;
    const int *rank_of[3];
    tsh_comm *groups[3];
    int64_t counts[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    int32_t mine = tsh_world(ctx)->rank, members[8];
    int i, a, m;
    groups[0] = tsh_tp(ctx);
    groups[1] = tsh_pp(ctx);
    groups[2] = tsh_dp(ctx);
    rank_of[0] = g->tp;
    rank_of[1] = g->pp;
    rank_of[2] = g->dp;
    for (i = 0; i < 3; i++) {
        CHECK(groups[i]->size == 2, "axis %d has size %d", i, groups[i]->size);
        CHECK(groups[i]->rank == rank_of[i][mine], "axis %d has rank %d", i, groups[i]->rank);
        CHECK(tsh_allgather(groups[i], &mine, members, counts, 1, TSH_I32) == TSH_OK, "axis %d", i);
        for (m = 0; m < 2; m++) {
            CHECK(rank_of[i][members[m]] == m, "axis %d: member %d is rank %d", i, m, members[m]);
            for (a = 0; a < 3; a++)
                CHECK(a == i || rank_of[a][members[m]] == rank_of[a][mine],
                      "axis %d: rank %d is another's", i, members[m]);
        }
    }
    return 0;
}

/* Fastest axis first: rank = sum of coordinate_k times the sizes before k. "tp-pp-dp" is ml's
 * order: its MP groups are {0, 1} {2, 3} .., PP {0, 2} {1, 3} .., DP {0, 4} {1, 5} .. "tp-dp-pp" is
 * Megatron's. */
static void eight_ranks_form_groups_in_the_given_order(void **state) {
    static const grid grids[] = {
        {{.tp = 2, .pp = 2},
         {0, 1, 0, 1, 0, 1, 0, 1},
         {0, 0, 1, 1, 0, 0, 1, 1},
         {0, 0, 0, 0, 1, 1, 1, 1}},
        {{.tp = 2, .pp = 2, .order = "tp-pp-dp"},
         {0, 1, 0, 1, 0, 1, 0, 1},
         {0, 0, 1, 1, 0, 0, 1, 1},
         {0, 0, 0, 0, 1, 1, 1, 1}},
        {{.tp = 2, .pp = 2, .order = "tp-dp-pp"},
         {0, 1, 0, 1, 0, 1, 0, 1},
         {0, 0, 0, 0, 1, 1, 1, 1},
         {0, 0, 1, 1, 0, 0, 1, 1}},
        {{.tp = 2, .pp = 2, .order = "dp-pp-tp"},
         {0, 0, 0, 0, 1, 1, 1, 1},
         {0, 0, 1, 1, 0, 0, 1, 1},
         {0, 1, 0, 1, 0, 1, 0, 1}},
        {{.tp = 2, .pp = 2, .order = "pp-tp-dp"},
         {0, 0, 1, 1, 0, 0, 1, 1},
         {0, 1, 0, 1, 0, 1, 0, 1},
         {0, 0, 0, 0, 1, 1, 1, 1}},
    };
    int i;
    (void)state;
    for (i = 0; i < COUNT(grids); i++) {
        grid g = grids[i];
        ranks_run_with(8, &g.desc, in_its_groups, &g);
    }
}

/* Uneven degrees: tp 3, pp 2, dp 1 of 6 ranks. */
static int in_six(tsh_ctx *ctx, void *user) {
    int rank = tsh_world(ctx)->rank;
    (void)user;
    CHECK(tsh_tp(ctx)->size == 3 && tsh_tp(ctx)->rank == rank / 2, "tp after pp");
    CHECK(tsh_pp(ctx)->size == 2 && tsh_pp(ctx)->rank == (rank & 1), "pp fastest");
    CHECK(tsh_dp(ctx)->size == 1 && tsh_dp(ctx)->rank == 0, "nothing left");
    return 0;
}

static int sizes_are(tsh_ctx *ctx, void *user) {
    const int *want = (const int *)user;
    CHECK(tsh_tp(ctx)->size == want[0] && tsh_pp(ctx)->size == want[1] &&
              tsh_dp(ctx)->size == want[2],
          "%d, %d, %d", tsh_tp(ctx)->size, tsh_pp(ctx)->size, tsh_dp(ctx)->size);
    CHECK(tsh_world(ctx)->size == 4, "the world is whole");
    return 0;
}

static void degrees_that_are_not_given_follow(void **state) {
    static const int rows[][5] = {{0, 0, 4, 1, 1}, {0, 2, 2, 2, 1}, {2, 0, 2, 1, 2},
                                  {1, 0, 1, 1, 4}, {1, 4, 1, 4, 1}, {4, 1, 4, 1, 1}};
    tsh_desc six = {.pp = 2, .order = "pp-tp-dp"};
    int i;
    (void)state;
    for (i = 0; i < COUNT(rows); i++) {
        tsh_desc desc = {.tp = rows[i][0], .pp = rows[i][1]};
        int want[3];
        memcpy(want, rows[i] + 2, sizeof want);
        ranks_run_with(4, &desc, sizes_are, want);
    }
    ranks_run_with(6, &six, in_six, NULL);
}

static int never_called(tsh_ctx *ctx, void *user) {
    (void)ctx;
    ++*(int *)user;
    return 0;
}

static void a_bad_description_opens_on_no_rank(void **state) {
    tsh_desc desc = {.tp = 3};
    int calls = 0;
    (void)state;
    assert_int_equal(tsh_threads_run(4, &desc, never_called, &calls), 1);
    assert_int_equal(calls, 0);
}

/* -------------------------------------------------------------------- memory */

/* A bit of everything that takes memory. */
static tsh_result work(tsh_ctx *ctx) {
    tsh_linear_desc d = {.in = 5, .out = 3};
    tsh_optim_desc adam = {.kind = TSH_ADAM};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_optim *optim = tsh_optim_new(tsh_root(ctx), &adam);
    tsh_tensor *kept = tsh_keep(tsh_randn(ctx, tsh_shape2(4, 5)));
    int i;
    for (i = 0; i < 3 && tsh_ok(ctx); i++) {
        tsh_tensor *y = tsh_gelu(tsh_forward(layer, kept));
        (void)tsh_backward(ctx, tsh_sum(tsh_reshape(tsh_transpose(y, 0, 1), tsh_shape1(12)), 0, 0));
        (void)tsh_optim_step(optim);
        tsh_zero_grads(tsh_root(ctx));
        (void)tsh_step_end(ctx);
    }
    tsh_tensor_free(kept);
    return tsh_last_error(ctx)->code;
}

static void the_allocator_s_contract_is_kept(void **state) {
    unit_memory memory;
    tsh_ctx *ctx = unit_open_memory(&memory);
    tsh_mem mem;
    size_t sum = 0;
    int k;
    (void)state;
    assert_int_equal(work(ctx), TSH_OK);
    mem = tsh_mem_stats(ctx);
    assert_int_equal(mem.calls, memory.calls);
    assert_int_equal(mem.total, memory.bytes);
    for (k = 0; k < TSH_MEM_KINDS; k++) {
        assert_true(mem.peak[k] >= mem.now[k]);
        sum += mem.now[k];
    }
    assert_int_equal(sum, mem.total);
    assert_true(mem.total_peak >= mem.total);
    tsh_close(ctx);
    assert_int_equal(memory.blocks, 0);
    assert_int_equal(memory.bytes, 0);
    assert_int_equal(memory.broken, 0);
}

static void any_refused_allocation_is_an_error_and_no_leak(void **state) {
    uint64_t at;
    int done = 0;
    (void)state;
    for (at = 1; !done; at++) {
        unit_memory memory = {.fail_at = at};
        tsh_desc desc = {.allocator = {unit_allocate, &memory}};
        tsh_ctx *ctx;
        tsh_result result = tsh_open(&desc, &ctx);
        assert_true(at > 1 ? ctx != NULL : ctx == NULL);
        if (result == TSH_OK) result = work(ctx);
        done = memory.takes < at;
        assert_int_equal(result, done ? TSH_OK : TSH_ERR_MEMORY);
        if (!done && ctx)
            assert_non_null(strstr(tsh_last_error(ctx)->message, "the allocator refused "));
        tsh_close(ctx);
        assert_int_equal(memory.bytes, 0);
        assert_int_equal(memory.broken, 0);
    }
    assert_true(at > 10);
}

/* Memory of `bytes` comes with a header and is rounded up: 128 bytes at most. */
static void expect_held(const tsh_ctx *ctx, int kind, size_t before, size_t bytes) {
    size_t now = tsh_mem_stats(ctx).now[kind];
    if (now < before + bytes || now > before + bytes + 128)
        fail_msg("kind %d holds %lu bytes, not %lu and a bit", kind, (unsigned long)(now - before),
                 (unsigned long)bytes);
}

static void memory_is_counted_by_kind(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    tsh_linear_desc d = {.in = 100, .out = 10, .bias = TSH_NO};
    tsh_optim_desc sgd = {.kind = TSH_SGD, .momentum = 0.5};
    tsh_module *layer = tsh_add_linear(tsh_root(ctx), "layer", &d);
    tsh_optim *optim = tsh_optim_new(layer, &sgd);
    tsh_tensor *x = tsh_tensor_new(ctx, TSH_REAL, tsh_shape2(1000, 100), tsh_replicated());
    const size_t r = sizeof(tsh_real);
    (void)state;
    expect_held(ctx, TSH_MEM_TENSORS, 0, 100000 * r);
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_PARAMETERS], 0);
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_GRADIENTS], 0);
    assert_int_equal(tsh_mem_stats(ctx).step_live, 0);
    assert_int_equal(tsh_backward(ctx, tsh_sum(tsh_forward(layer, x), TSH_ALL, 0)), TSH_OK);
    expect_held(ctx, TSH_MEM_PARAMETERS, 0, 1000 * r);
    expect_held(ctx, TSH_MEM_GRADIENTS, 0, 1000 * r);
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_OPTIMISER], 0);
    assert_int_equal(tsh_optim_step(optim), TSH_OK);
    expect_held(ctx, TSH_MEM_OPTIMISER, 0, 1000 * r);
    assert_true(tsh_mem_stats(ctx).now[TSH_MEM_STEP] >= tsh_mem_stats(ctx).step_live_peak);
    assert_true(tsh_mem_stats(ctx).step_live_peak >= 10000 * r);
    assert_int_equal(tsh_step_end(ctx), TSH_OK);
    assert_int_equal(tsh_mem_stats(ctx).step_live, 0);
    tsh_tensor_free(x);
    assert_int_equal(tsh_mem_stats(ctx).now[TSH_MEM_TENSORS], 0);
    assert_true(tsh_mem_stats(ctx).peak[TSH_MEM_TENSORS] >= 100000 * r);
    unit_close(ctx);
}

static void values_are_aligned_to_64_bytes(void **state) {
    tsh_ctx *ctx = unit_open(NULL);
    int64_t n;
    (void)state;
    for (n = 1; n < 200; n += 7) {
        assert_int_equal((uintptr_t)tsh_data(ctx, tsh_zeros(ctx, tsh_shape1(n))) % 64, 0);
        assert_int_equal((uintptr_t)tsh_data(
                             ctx, tsh_tensor_new(ctx, TSH_I32, tsh_shape1(n), tsh_replicated())) %
                             64,
                         0);
    }
    unit_close(ctx);
}

/* The groups of a ctx that is NULL: rank 0 of 1, without collectives. */
static void no_ctx_is_alone(void **state) {
    tsh_comm *(*const group[])(tsh_ctx *ctx) = {tsh_world, tsh_tp, tsh_pp, tsh_dp};
    int i;
    (void)state;
    for (i = 0; i < COUNT(group); i++) {
        tsh_comm *comm = group[i](NULL), out;
        float value = 1;
        assert_int_equal(comm->rank, 0);
        assert_int_equal(comm->size, 1);
        assert_int_equal(tsh_barrier(comm), TSH_ERR_ARGUMENT);
        assert_int_equal(tsh_allreduce(comm, &value, 1, TSH_F32, TSH_SUM), TSH_ERR_ARGUMENT);
        assert_int_equal(tsh_comm_split(comm, 0, 0, &out), TSH_ERR_ARGUMENT);
        assert_int_equal(tsh_comm_error(comm, NULL), TSH_OK);
        tsh_comm_progress(comm);
        tsh_comm_abort(comm, TSH_ERR_ABORTED, "nobody hears it");
        tsh_comm_close(comm);
        assert_int_equal(comm->size, 1);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_ctx_is_alone),
        cmocka_unit_test(every_result_has_a_name_and_a_sentence),
        cmocka_unit_test(the_version_is_that_of_the_macros),
        cmocka_unit_test(dtypes_have_sizes),
        cmocka_unit_test(the_first_error_is_kept),
        cmocka_unit_test(a_ctx_with_an_error_computes_nothing_until_it_is_cleared),
        cmocka_unit_test(one_rank_recovers_from_any_error),
        cmocka_unit_test(long_messages_are_cut),
        cmocka_unit_test(null_for_a_ctx_is_an_error_without_harm),
        cmocka_unit_test(an_error_reaches_the_peers_once_told),
        cmocka_unit_test(a_ctx_of_one_rank_opens_by_default),
        cmocka_unit_test(run_opens_calls_and_closes),
        cmocka_unit_test(an_error_is_logged_once_unless_it_is_cleared_before),
        cmocka_unit_test(each_rank_logs_its_own_error_or_that_of_a_peer),
        cmocka_unit_test(a_warning_is_a_message_of_the_logger),
        cmocka_unit_test(run_says_why_it_did_not_run),
        cmocka_unit_test(degrees_must_divide_the_ranks),
        cmocka_unit_test(degrees_that_would_divide_are_listed),
        cmocka_unit_test(an_order_names_every_axis_once),
        cmocka_unit_test(eight_ranks_form_groups_in_the_given_order),
        cmocka_unit_test(degrees_that_are_not_given_follow),
        cmocka_unit_test(a_bad_description_opens_on_no_rank),
        cmocka_unit_test(the_allocator_s_contract_is_kept),
        cmocka_unit_test(any_refused_allocation_is_an_error_and_no_leak),
        cmocka_unit_test(memory_is_counted_by_kind),
        cmocka_unit_test(values_are_aligned_to_64_bytes),
        cmocka_unit_test(messages_have_no_control_characters),
    };
    return cmocka_run_group_tests_name("unit/base", tests, NULL, NULL);
}
