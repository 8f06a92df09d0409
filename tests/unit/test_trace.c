/* A trace: well-formed, complete, in lanes, and without influence on what it watches. */
#include "../../tshard.h"
#include "../../backends/tshard_threads.h"
#include "../support/small_gpt.h"
#include <unistd.h> /* close */
#ifndef _WIN32
#include <sys/resource.h> /* setrlimit */
#include <sys/wait.h>
#endif

enum { STEPS = 2, TEXT = 1 << 22 };

/* What the write function took. */
typedef struct text {
    char data[TEXT];
    size_t size;
    int refuse; /* after that many calls */
    int64_t clock;
} text;

static text written;

static int take(const char *data, size_t size, void *user) {
    text *t = (text *)user;
    if (t->refuse && --t->refuse == 0) return 0;
    if (t->size + size >= TEXT) return 0;
    memcpy(t->data + t->size, data, size);
    t->size += size;
    t->data[t->size] = '\0';
    return 1;
}

/* A clock that goes on by 1.5 us whenever it is read. One rank's only. */
static int64_t tick(void *user) {
    return ((text *)user)->clock += 1500;
}

/* ------------------------------------------------------------------------ JSON */

static const char *json_value(const char *at);

static const char *json_space(const char *at) {
    while (*at && strchr(" \t\r\n", *at)) at++;
    return at;
}

/* Past a string; NULL: it is none. */
static const char *json_string(const char *at) {
    if (*at++ != '"') return NULL;
    for (; *at != '"'; at++) {
        if ((unsigned char)*at < ' ') return NULL;
        if (*at == '\\' && (*++at == '\0' || !strchr("\"\\/bfnrtu", *at))) return NULL;
    }
    return at + 1;
}

/* Past an array or object, whose members are values, or names and values. */
static const char *json_list(const char *at, char end) {
    at = json_space(at + 1);
    if (*at == end) return at + 1;
    for (;;) {
        if (end == '}') {
            at = json_string(json_space(at));
            if (!at || *(at = json_space(at)) != ':') return NULL;
            at++;
        }
        at = json_value(json_space(at));
        if (!at) return NULL;
        at = json_space(at);
        if (*at == end) return at + 1;
        if (*at++ != ',') return NULL;
    }
}

static const char *json_value(const char *at) {
    char *end;
    if (*at == '{') return json_list(at, '}');
    if (*at == '[') return json_list(at, ']');
    if (*at == '"') return json_string(at);
    if (*at != '-' && (*at < '0' || *at > '9')) return NULL;
    (void)strtod(at, &end);
    return end;
}

static void assert_json(const char *data) {
    const char *end = json_value(json_space(data));
    if (!end || *json_space(end) != '\0') fail_msg("no JSON: %.200s", end ? end : data);
}

/* ---------------------------------------------------------------------- events */

typedef struct event {
    char name[64], kind[16], module[64];
    int lane;
    double begin, length, bytes;
} event;

/* The next line that is an event; 0: there is none. */
static int next_event(const char **at, event *e) {
    for (; *at; *at = strchr(*at, '\n'), *at += *at != NULL) {
        const char *bytes, *module;
        e->bytes = -1;
        if (sscanf(*at,
                   "{\"ph\":\"X\",\"name\":\"%63[^\"]\",\"cat\":\"%15[a-z]\",\"pid\":0,"
                   "\"tid\":%d,\"ts\":%lf,\"dur\":%lf",
                   e->name, e->kind, &e->lane, &e->begin, &e->length) != 5)
            continue;
        bytes = strstr(*at, "\"bytes\":");
        module = strstr(*at, "\"module\":\"");
        *at = strchr(*at, '\n') + 1;
        if (bytes && bytes < *at) e->bytes = strtod(bytes + 8, NULL);
        assert_true(module && module < *at);
        e->module[0] = '\0';
        (void)sscanf(module, "\"module\":\"%63[^\"]", e->module);
        return 1;
    }
    return 0;
}

static int count(int lane, const char *kind, const char *name) {
    const char *at = written.data;
    event e;
    int n = 0;
    while (next_event(&at, &e))
        n += e.lane == lane && strcmp(e.kind, kind) == 0 && (!name || strcmp(e.name, name) == 0);
    return n;
}

/* Events of this op that ran in the forward or backward of this module. */
static int count_in(int lane, const char *kind, const char *name, const char *module) {
    const char *at = written.data;
    event e;
    int n = 0;
    while (next_event(&at, &e))
        n += e.lane == lane && strcmp(e.kind, kind) == 0 && strcmp(e.name, name) == 0 &&
             strcmp(e.module, module) == 0;
    return n;
}

/* ----------------------------------------------------------------------- ranks */

typedef struct job {
    const tsh_trace_desc *desc; /* NULL: no trace */
    double loss[STEPS];
    uint64_t bytes[RANKS_MAX]; /* what collectives of the traced steps sent */
    int parameters;
} job;

/* What one rank writes, from the clock's first tick. */
static void record(int (*fn)(tsh_ctx *ctx, void *user)) {
    written.size = 0;
    written.clock = 0;
    ranks_run(1, fn, NULL);
    assert_json(written.data);
}

static uint64_t sent(tsh_ctx *ctx) {
    uint64_t bytes = 0;
    for (int i = 0; i < TSH_COLL_KINDS; i++)
        bytes += tsh_tp(ctx)->stats.bytes[i] + tsh_world(ctx)->stats.bytes[i];
    return bytes;
}

static void count_parameter(const char *path, tsh_tensor *param, void *user) {
    (void)path, (void)param;
    ++*(int *)user;
}

static int train(tsh_ctx *ctx, void *user) {
    job *j = (job *)user;
    const tsh_optim_desc adamw = {.kind = TSH_ADAMW, .lr = 1e-2};
    const tsh_shape shape = tsh_shape2(GPT_BATCH, GPT_CONTEXT);
    tsh_tensor *ids = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_tensor *targets = tsh_tensor_new(ctx, TSH_I32, shape, tsh_replicated());
    tsh_module *gpt = gpt_add(ctx);
    const int rank = tsh_world(ctx)->rank;
    tsh_optim *optim;
    uint64_t before;
    CHECK(tsh_parallelize(gpt, gpt_plan, GPT_RULES) == TSH_OK, "plan");
    CHECK(tsh_materialize(gpt) == TSH_OK, "values");
    optim = tsh_optim_new(gpt, &adamw);
    if (rank == 0) tsh_each_param(gpt, count_parameter, &j->parameters);
    before = sent(ctx);
    if (j->desc) CHECK(tsh_trace_begin(ctx, j->desc) == TSH_OK, "begin");
    for (int step = 0; step < STEPS; step++) {
        double loss = gpt_step(ctx, optim, ids, targets, step);
        if (rank == 0) j->loss[step] = loss;
    }
    j->bytes[rank] = sent(ctx) - before;
    if (j->desc) CHECK(tsh_trace_end(ctx) == TSH_OK, "end");
    CHECK_OK();
    return 0;
}

static void every_rank_has_a_lane(void **state) {
    const tsh_trace_desc desc = {.print = take, .user = &written};
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        job plain = {NULL, {0}, {0}, 0}, traced = {&desc, {0}, {0}, 0};
        written.size = 0;
        ranks_run(ranks, train, &plain);
        ranks_run(ranks, train, &traced);
        assert_memory_equal(plain.loss, traced.loss, sizeof plain.loss);
        assert_json(written.data);
        for (int r = 0; r < ranks; r++) {
            const char *at = written.data;
            double bytes = 0;
            event e;
            assert_int_equal(count(r, "module", "h.1.attn.c_attn"), STEPS);
            assert_int_equal(count(r, "module", "h"), STEPS);
            assert_int_equal(count(r, "forward", "tsh_attention"), STEPS * GPT_LAYERS);
            assert_int_equal(count(r, "backward", "tsh_attention"), STEPS * GPT_LAYERS);
            for (int back = 0; back < 2; back++) {
                const char *kind = back ? "backward" : "forward";
                assert_int_equal(count_in(r, kind, "tsh_attention", "h.1.attn"), STEPS);
                assert_int_equal(count_in(r, kind, "tsh_linear", "h.0.mlp.c_fc"), STEPS);
                assert_int_equal(count_in(r, kind, "tsh_cross_entropy", ""), STEPS);
            }
            assert_int_equal(count(r, "forward", "tsh_cross_entropy"), STEPS);
            assert_int_equal(count(r, "backward", "tsh_cross_entropy"), STEPS);
            assert_int_equal(count(r, "optimiser", "tsh_optim_step"), STEPS);
            assert_int_equal(count(r, "optimiser", "norm of gradients"), STEPS);
            assert_int_equal(count(r, "optimiser", "h.1.attn.c_attn.weight"), STEPS);
            assert_int_equal(count(r, "optimiser", NULL), STEPS * (2 + traced.parameters));
            while (next_event(&at, &e)) {
                assert_true(e.length >= 0);
                if (e.lane == r && e.bytes >= 0 && strcmp(e.name, "wait") != 0) bytes += e.bytes;
            }
            assert_true(bytes == (double)traced.bytes[r]);
            if (ranks > 1) assert_true(count(r, "collective", "all-reduce") > 4 * STEPS);
            if (ranks > 1) assert_true(count(r, "collective", "wait") > 0);
        }
        assert_int_equal(count(ranks, "module", NULL), 0);
    }
}

/* ------------------------------------------------------------------- one rank */

/* A clock that ticks at every look makes all times exact. What runs within something lies within
 * its time. */
static int steps_nest(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc desc = {.print = take, .now = tick, .user = &written};
    const tsh_optim_desc sgd = {.kind = TSH_SGD, .lr = 1};
    const tsh_linear_desc linear = {.in = 3, .out = 2};
    tsh_module *net = tsh_add_linear(tsh_root(ctx), "net", &linear);
    tsh_optim *optim = tsh_optim_new(net, &sgd);
    tsh_tensor *y = tsh_forward(net, tsh_ones(ctx, tsh_shape2(2, 3)));
    (void)user;
    CHECK(tsh_backward(ctx, tsh_sum(y, TSH_ALL, 0)) == TSH_OK, "backward");
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    CHECK(tsh_optim_step(optim) == TSH_OK && tsh_trace_end(ctx) == TSH_OK, "step");
    return 0;
}

/* Every look at the clock is one of these beginnings or ends. */
static void an_optimiser_step_nests(void **state) {
    static const struct {
        const char *name, *kind;
        double begin, length;
    } want[] = {
        {"all-reduce", "collective", 4.5, 1.5},     {"all-reduce", "collective", 7.5, 1.5},
        {"norm of gradients", "optimiser", 3, 7.5}, {"net.weight", "optimiser", 12, 1.5},
        {"net.bias", "optimiser", 15, 1.5},         {"tsh_optim_step", "optimiser", 1.5, 16.5}};
    const char *at = written.data;
    event e;
    (void)state;
    record(steps_nest);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        assert_true(next_event(&at, &e));
        assert_string_equal(e.name, want[i].name);
        assert_string_equal(e.kind, want[i].kind);
        assert_true(e.begin == want[i].begin && e.length == want[i].length);
    }
    assert_false(next_event(&at, &e));
}

static int nests(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc desc = {.print = take, .now = tick, .user = &written};
    tsh_tensor *x = tsh_ones(ctx, tsh_shape2(2, 3)), *y;
    (void)user;
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    y = tsh_mean(tsh_exp(x), TSH_ALL, 0);
    CHECK(y && tsh_trace_end(ctx) == TSH_OK, "end");
    return 0;
}

static void times_are_those_of_the_clock(void **state) {
    const char *at = written.data;
    event e;
    (void)state;
    record(nests);
    assert_true(next_event(&at, &e)); /* looked at 1.5, 3.0: begun at 1.5, done at 3.0 */
    assert_string_equal(e.name, "tsh_exp");
    assert_string_equal(e.kind, "forward");
    assert_true(e.begin == 1.5 && e.length == 1.5);
    assert_true(next_event(&at, &e));
    assert_string_equal(e.name, "tsh_mean");
    assert_true(e.begin == 4.5 && e.length == 1.5);
    assert_false(next_event(&at, &e));
}

static void triple(tsh_tensor *const *in, int n, void *const *out, void *user) {
    tsh_real *y = (tsh_real *)out[0];
    (void)user, (void)in, (void)n;
    *y = 3;
}

static void triple_back(tsh_tensor *const *in, int n, const void *const *out,
                        const tsh_real *const *grad_out, tsh_real *const *grad_in, void *user) {
    (void)user, (void)in, (void)n, (void)out, (void)grad_out, (void)grad_in;
}

/* A name that JSON must escape, and a trace that is full. */
static int odd(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc desc = {.print = take, .user = &written, .limit = 2};
    tsh_custom_op_desc op = {.name = "a \"b\"\\\n", .forward = triple, .backward = triple_back};
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(1));
    (void)user;
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    for (int i = 0; i < 5; i++) CHECK(tsh_custom_op(ctx, &x, 1, NULL, &op), "op");
    CHECK(tsh_trace_end(ctx) == TSH_OK, "end");
    return 0;
}

static void odd_names_and_a_limit(void **state) {
    int lines = 0;
    (void)state;
    record(odd);
    for (const char *at = written.data; (at = strstr(at, "\"a \\\"b\\\"\\\\\\u000a\"")) != NULL;
         at++)
        lines++;
    assert_int_equal(lines, 2);
    assert_non_null(strstr(written.data, "\"left_out\":3"));
}

static int to_a_file(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc desc = {.path = (const char *)user};
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(4));
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    CHECK(tsh_exp(x), "exp");
    CHECK(tsh_trace_end(ctx) == TSH_OK, "end");
    return 0;
}

static void a_file(void **state) {
    char path[] = "/tmp/tshard_trace_XXXXXX";
    int descriptor = mkstemp(path);
    FILE *file;
    (void)state;
    assert_true(descriptor >= 0);
    assert_int_equal(close(descriptor), 0); /* Windows would not open it again before */
    ranks_run(2, to_a_file, path);
    file = fopen(path, "r");
    assert_non_null(file);
    written.size = fread(written.data, 1, TEXT - 1, file);
    written.data[written.size] = '\0';
    (void)fclose(file);
    (void)remove(path);
    assert_json(written.data);
    assert_int_equal(count(0, "forward", "tsh_exp"), 1);
    assert_int_equal(count(1, "forward", "tsh_exp"), 1);
}

/* ---------------------------------------------------------------------- errors */

static int mistakes(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc good = {.print = take, .user = &written}, none = {.user = &written};
    const tsh_trace_desc both = {.path = "x", .print = take};
    const tsh_trace_desc nowhere = {.path = "/nonexistent/folder/trace.json"};
    (void)user;
    CHECK(tsh_trace_begin(NULL, &good) == TSH_ERR_ARGUMENT, "no ctx");
    CHECK(tsh_trace_end(NULL) == TSH_ERR_ARGUMENT, "no ctx");
    CHECK(tsh_trace_end(ctx) == TSH_ERR_STATE, "end first");
    CHECK_SAYS(TSH_ERR_STATE, "no trace runs");
    CHECK(tsh_trace_begin(ctx, NULL) == TSH_ERR_ARGUMENT, "no desc");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "either a path or print");
    CHECK(tsh_trace_begin(ctx, &none) == TSH_ERR_ARGUMENT, "nowhere to go");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "either a path or print");
    CHECK(tsh_trace_begin(ctx, &both) == TSH_ERR_ARGUMENT, "two ways to go");
    CHECK_SAYS(TSH_ERR_ARGUMENT, "either a path or print");
    CHECK(tsh_trace_begin(ctx, &nowhere) == TSH_OK, "begin");
    CHECK(tsh_trace_begin(ctx, &good) == TSH_ERR_STATE, "twice");
    CHECK_SAYS(TSH_ERR_STATE, "runs already");
    CHECK(tsh_trace_end(ctx) == TSH_ERR_IO, "no folder");
    CHECK_SAYS(TSH_ERR_IO, "/nonexistent/folder/trace.json\" cannot be written: No such");
    CHECK(tsh_trace_begin(ctx, &good) == TSH_OK, "after an error");
    CHECK(tsh_trace_end(ctx) == TSH_OK, "end");
    CHECK(tsh_trace_begin(ctx, &good) == TSH_OK, "closed without an end");
    CHECK(tsh_exp(tsh_ones(ctx, tsh_shape1(1))), "exp");
    return 0;
}

static void mistakes_are_told(void **state) {
    (void)state;
    ranks_run(1, mistakes, NULL);
}

/* Rank 0 cannot write: the others are done all the same, and are told at their next look. */
static int refused(tsh_ctx *ctx, void *user) {
    const tsh_trace_desc desc = {.print = take, .user = &written};
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(4));
    const tsh_error *error = tsh_last_error(ctx);
    (void)user;
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    for (int i = 0; i < 200; i++) CHECK(tsh_exp(x), "exp");
    if (tsh_trace_end(ctx) == TSH_OK) {
        CHECK(tsh_world(ctx)->rank > 0, "rank 0 cannot write");
        CHECK(tsh_barrier(tsh_world(ctx)) == TSH_ERR_IO, "told");
    }
    CHECK(!tsh_ok(ctx) && error->code == TSH_ERR_IO && error->rank == 0 &&
              strstr(error->message, "the text cannot be written"),
          "%s", error->message);
    return 0;
}

static void a_refusal_ends_the_world(void **state) {
    (void)state;
    for (int calls = 1; calls <= 9; calls += 4) { /* of rank 0's text and of the others' */
        written.size = 0;
        written.refuse = calls;
        ranks_run(3, refused, NULL);
    }
    written.refuse = 0;
}

#ifndef _WIN32
/* Where a file may have fewer bytes than the trace: an error of rank 0, which reaches all. */
static int beyond_the_limit(tsh_ctx *ctx, void *user) {
    const struct rlimit tight = {300, 300};
    const tsh_trace_desc desc = {.path = (const char *)user};
    tsh_tensor *x = tsh_ones(ctx, tsh_shape1(4));
    const tsh_error *error = tsh_last_error(ctx);
    CHECK(tsh_trace_begin(ctx, &desc) == TSH_OK, "begin");
    for (int i = 0; i < 200; i++) CHECK(tsh_exp(x), "exp");
    /* a rank that is still in here when rank 0 fails gets that error */
    if (tsh_barrier(tsh_world(ctx)) != TSH_OK) CHECK(tsh_world(ctx)->rank > 0, "all begin");
    CHECK(!setrlimit(RLIMIT_FSIZE, &tight), "limit");
    if (tsh_ok(ctx) && tsh_trace_end(ctx) == TSH_OK)
        CHECK(tsh_world(ctx)->rank > 0 && tsh_barrier(tsh_world(ctx)) == TSH_ERR_IO, "told");
    CHECK(!tsh_ok(ctx) && strstr(error->message, "files of this process may have 300"), "%s",
          error->message);
    return 0;
}

/* No SIGXFSZ, and the file of an earlier trace stays. */
static void a_limit_of_file_sizes_is_an_error(void **state) {
    char path[] = "/tmp/tshard_trace_XXXXXX", found[8] = "";
    const int descriptor = mkstemp(path);
    FILE *file;
    int status;
    (void)state;
    assert_true(descriptor >= 0 && write(descriptor, "old", 3) == 3 && close(descriptor) == 0);
    for (int ranks = 1; ranks <= 2; ranks++) {
        const char *why = "";
        const pid_t child = fork();
        if (child == 0) {
            const int failed = ranks_try(ranks, NULL, beyond_the_limit, path, &why);
            _exit(failed ? fprintf(stderr, "%s\n", why) > 0 : 0);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    file = fopen(path, "r");
    assert_true(file && fgets(found, sizeof found, file) && fclose(file) == 0);
    assert_string_equal(found, "old");
    (void)remove(path);
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
#ifndef _WIN32
        cmocka_unit_test(a_limit_of_file_sizes_is_an_error),
#endif
        cmocka_unit_test(every_rank_has_a_lane),    cmocka_unit_test(times_are_those_of_the_clock),
        cmocka_unit_test(odd_names_and_a_limit),    cmocka_unit_test(a_file),
        cmocka_unit_test(mistakes_are_told),        cmocka_unit_test(an_optimiser_step_nests),
        cmocka_unit_test(a_refusal_ends_the_world),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
