/* ranks.h - what tests of distributed code share: ranks as threads (with TESTS_MPI: as processes of
 * an mpirun) that report instead of asserting, tensors written as text, and a function's values and
 * gradients at any degree against the dense ones.
 *
 * Include it after tshard.h and backends/tshard_threads.h. cmocka's assertions leave by longjmp,
 * which must not happen in a rank's thread: rank functions use CHECK, and ranks_run asserts. */
#ifndef TSHARD_TESTS_RANKS_H
#define TSHARD_TESTS_RANKS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#define UNUSED   __attribute__((unused))
#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

enum { RANKS_MAX = 8, RANKS_INPUTS = 4, RANKS_WATCHED = 2, RANKS_PARAMS = 96, RANKS_TEXT = 1024 };

#ifdef TESTS_MPI
#include "mpi_world.h"
#define ranks_degrees mpi_degrees
#else
UNUSED static const int ranks_degrees[] = {1, 2, 3, 4, 8};
#endif

/* ------------------------------------------------------------- running ranks */

/* The first failure of each rank; and whether it only followed from a peer's. */
static char ranks_failure[RANKS_MAX][RANKS_TEXT];
static int ranks_follows[RANKS_MAX];

UNUSED TSH_PRINTF(3, 4) static int ranks_fail(tsh_ctx *ctx, int line, const char *format, ...) {
    int rank = tsh_world(ctx)->rank, used;
    char *text = ranks_failure[rank];
    const tsh_error *error = tsh_last_error(ctx);
    va_list list;
    if (text[0]) return 1;
    ranks_follows[rank] = error->code != TSH_OK && error->rank != rank;
    used = snprintf(text, RANKS_TEXT, "rank %d of %d, line %d: ", rank, tsh_world(ctx)->size, line);
    va_start(list, format);
    used += vsnprintf(text + used, (size_t)(RANKS_TEXT - used), format, list);
    va_end(list);
    if (error->code != TSH_OK && used < RANKS_TEXT)
        (void)snprintf(text + used, (size_t)(RANKS_TEXT - used), " (%s: %s)",
                       tsh_result_name(error->code), error->message);
    return 1;
}

/* In a function that returns int, with ctx in scope: returns 1 with a report where it fails. */
#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) return ranks_fail(ctx, __LINE__, #condition "; " __VA_ARGS__);           \
    } while (0)
/* The same where the condition says all. */
#define CHECK_TRUE(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) return ranks_fail(ctx, __LINE__, "%s", #condition);                      \
    } while (0)
#define CHECK_OK() CHECK(tsh_ok(ctx), "no error is expected")

/* ctx holds an error of this code whose sentence holds `part`. */
UNUSED static int ranks_says(tsh_ctx *ctx, tsh_result code, const char *part) {
    const tsh_error *error = tsh_last_error(ctx);
    return error->code == code && strstr(error->message, part) != NULL;
}

/* As CHECK: there is such an error; it is forgotten then. */
#define CHECK_SAYS(code, part)                                                                     \
    do {                                                                                           \
        if (!ranks_says(ctx, code, part))                                                          \
            return ranks_fail(ctx, __LINE__, "not %s, \"%s\"", tsh_result_name(code), part);       \
        tsh_clear_error(ctx);                                                                      \
    } while (0)

#ifdef TESTS_MPI
/* On all processes; every one gets the largest result, and what all ranks report. */
static int ranks_over_mpi(const tsh_desc *desc, int (*fn)(tsh_ctx *, void *), void *user) {
    tsh_desc mine;
    tsh_ctx *ctx = NULL;
    int results[RANKS_MAX] = {0}, r, worst = 0;
    memset(&mine, 0, sizeof mine);
    if (desc) mine = *desc;
    results[mpi_rank()] = 1;
    if (mpi_join(&mine.comm) == TSH_OK) {
        if (tsh_open(&mine, &ctx) == TSH_OK) results[mpi_rank()] = fn(ctx, user);
        tsh_close(ctx);
    }
    mpi_share(results, sizeof results[0]);
    mpi_share(ranks_failure, sizeof ranks_failure[0]);
    mpi_share(ranks_follows, sizeof ranks_follows[0]);
    for (r = 0; r < mpi_size(); r++) worst = results[r] > worst ? results[r] : worst;
    return worst;
}
#endif

/* Under MPI: as mpi_world.h says; or as threads of the first process, or of every one, which then
 * all have what such a run leaves in memory. */
typedef enum ranks_place { RANKS_ANY, RANKS_FIRST, RANKS_EACH } ranks_place;
UNUSED static ranks_place ranks_where;

UNUSED static int ranks_start(int ranks, const tsh_desc *desc, int (*fn)(tsh_ctx *, void *),
                              void *user) {
#ifdef TESTS_MPI
    if (ranks == mpi_size() && ranks_where == RANKS_ANY) return ranks_over_mpi(desc, fn, user);
    if (mpi_rank() > 0 && ranks_where != RANKS_EACH && (ranks > 1 || ranks_where == RANKS_FIRST))
        return 0;
#endif
    return tsh_threads_run(ranks, desc, fn, user);
}

/* Runs fn on `ranks` threads with desc; returns 0, or 1 with the first report in *why. */
UNUSED static int ranks_try(int ranks, const tsh_desc *desc, int (*fn)(tsh_ctx *, void *),
                            void *user, const char **why) {
    int r, result, follows;
    (void)setenv("TSHARD_TIMEOUT", "30", 1); /* a hang ends as a failed test */
    memset(ranks_failure, 0, sizeof ranks_failure);
    result = ranks_start(ranks, desc, fn, user);
    *why = result ? "a rank's ctx could not be opened" : NULL;
    for (follows = 1; follows >= 0; follows--)
        for (r = ranks - 1; r >= 0; r--)
            if (ranks_failure[r][0] && ranks_follows[r] == follows) *why = ranks_failure[r];
    return result;
}

UNUSED static void ranks_run_with(int ranks, const tsh_desc *desc, int (*fn)(tsh_ctx *, void *),
                                  void *user) {
    const char *why;
    if (ranks_try(ranks, desc, fn, user, &why)) fail_msg("%s", why);
}

UNUSED static void ranks_run_at(ranks_place place, int ranks, const tsh_desc *desc,
                                int (*fn)(tsh_ctx *, void *), void *user) {
    ranks_where = place;
    ranks_run_with(ranks, desc, fn, user);
    ranks_where = RANKS_ANY;
}

/* After a run whose rank r wrote row r of `rows`, of so many bytes each: every process has all. */
UNUSED static void ranks_share(int ranks, void *rows, size_t bytes) {
#ifdef TESTS_MPI
    if (ranks == mpi_size()) mpi_share(rows, bytes);
#endif
    (void)ranks, (void)rows, (void)bytes;
}

UNUSED static void ranks_run(int ranks, int (*fn)(tsh_ctx *, void *), void *user) {
    ranks_run_with(ranks, NULL, fn, user);
}

/* ------------------------------------------------------------ tensors as text
 * "2,3n,4 S(1, 3 segments, unit 2)": a shape, whose sizes may be multiples of n, and a layout as
 * tsh_layout_text writes it. "S(1)[2n:2,n:1]" gives segments of their own lengths and units. "%5
 * 2,n R": integers in [0, 5). "-" stands for a scalar's shape. */

typedef struct spec {
    tsh_shape shape;
    tsh_layout layout;
    int64_t below; /* integers below this; 0: values */
} spec;

/* A text that is misspelt would be another tensor, and its test pass: it ends the program. */
UNUSED static void spec_refuse(const char *text) {
    fprintf(stderr, "\"%s\" is neither a size nor a shape nor a layout\n", text);
    exit(1);
}

static int64_t spec_size(const char **at, int64_t n) {
    int64_t size = 1;
    char *end;
    if ((**at < '0' || **at > '9') && **at != 'n') spec_refuse(*at);
    if (**at >= '0' && **at <= '9') {
        size = strtol(*at, &end, 10);
        *at = end;
    }
    if (**at == 'n') {
        size *= n;
        ++*at;
    }
    return size;
}

static tsh_shape spec_shape(const char **at, int64_t n) {
    tsh_shape shape = tsh_shape0();
    if (**at == '-') {
        ++*at;
        return shape;
    }
    for (;;) {
        shape.dim[shape.ndim++] = spec_size(at, n);
        if (**at != ',') return shape;
        ++*at;
    }
}

static tsh_layout spec_layout(const char *at, int64_t n) {
    int dim = 0, segments = 1, unit = 1, s, end = 0;
    const char *list;
    tsh_layout layout;
    if (strcmp(at, "R") == 0) return tsh_replicated();
    if (strcmp(at, "P") == 0) return tsh_partial();
    (void)sscanf(at, "S(%d)%n", &dim, &end);
    if (!end) (void)sscanf(at, "S(%d, unit %d)%n", &dim, &unit, &end);
    if (!end) (void)sscanf(at, "S(%d, %d segments, unit %d)%n", &dim, &segments, &unit, &end);
    if (!end || (at[end] && at[end] != '[')) spec_refuse(at);
    layout = tsh_shard_segments(dim, segments, unit);
    if (!at[end]) return layout;
    for (s = 0, list = at + end; *list != ']'; s++) {
        if (s == TSH_MAX_SEGMENTS || *list != (s ? ',' : '[')) spec_refuse(at);
        list++;
        layout.segments = s + 1;
        layout.segment[s].length = spec_size(&list, n);
        if (*list++ != ':') spec_refuse(at);
        layout.segment[s].unit = spec_size(&list, n);
    }
    if (list[1]) spec_refuse(at);
    return layout;
}

UNUSED static spec spec_parse(const char *text, int64_t n) {
    spec s;
    s.below = 0;
    if (*text == '%') {
        text++;
        s.below = spec_size(&text, n);
        if (*text++ != ' ') spec_refuse(text - 1);
    }
    s.shape = spec_shape(&text, n);
    if (*text && *text != ' ') spec_refuse(text);
    s.layout = *text ? spec_layout(text + 1, n) : tsh_replicated();
    return s;
}

/* Whether two layouts mean the same for a shape: every rank owns the same elements. */
UNUSED static int spec_same_layout(const tsh_layout *a, const tsh_layout *b, tsh_shape shape,
                                   int ranks) {
    tsh_range ra[TSH_MAX_SEGMENTS], rb[TSH_MAX_SEGMENTS];
    int da = a->dim < 0 ? a->dim + shape.ndim : a->dim;
    int db = b->dim < 0 ? b->dim + shape.ndim : b->dim, r, s;
    if (a->kind != b->kind) return 0;
    if (a->kind != TSH_SHARDED) return 1;
    if (da != db || da >= shape.ndim) return 0;
    for (r = 0; r < ranks; r++) {
        int64_t na = tsh_shard_range(*a, shape.dim[da], ranks, r, ra);
        int64_t nb = tsh_shard_range(*b, shape.dim[db], ranks, r, rb);
        if (na < 0 || na != nb || a->segments != b->segments) return 0;
        for (s = 0; s < a->segments; s++)
            if (ra[s].length != rb[s].length || (ra[s].length && ra[s].start != rb[s].start))
                return 0;
    }
    return 1;
}

/* ------------------------------------------------------------------- numbers */

UNUSED static uint64_t ranks_mix(uint64_t seed, uint64_t e) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + e * 0xd1342543de82ef95u + 0x632be59bd9b4e019u;
    x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 29);
}

/* A small integer that is never 0, in [-3, 3]: products and sums stay exact. */
UNUSED static double ranks_number(uint64_t seed, uint64_t e) {
    static const double numbers[6] = {-3, -2, -1, 1, 2, 3};
    return numbers[ranks_mix(seed, e) % 6];
}

static int64_t spec_numel(const tsh_shape *shape) {
    int64_t n = 1;
    int d;
    for (d = 0; d < shape->ndim; d++) n *= shape->dim[d];
    return n;
}

/* An owned tensor of values (or, with below, of integers) made from seed, laid out as the spec
 * says: the same global values at every degree. NULL and an error on failure. */
UNUSED static tsh_tensor *spec_tensor(tsh_ctx *ctx, const spec *s, uint64_t seed) {
    size_t n = (size_t)spec_numel(&s->shape), e;
    tsh_real *values = (tsh_real *)malloc((n + 1) * sizeof *values);
    int32_t *ids = (int32_t *)malloc((n + 1) * sizeof *ids);
    int rank = tsh_tp(ctx)->rank, size = tsh_tp(ctx)->size, r;
    tsh_tensor *t = tsh_tensor_new(ctx, s->below ? TSH_I32 : TSH_REAL, s->shape, s->layout);
    for (e = 0; e < n; e++) {
        ids[e] = s->below ? (int32_t)(ranks_mix(seed, e) % (uint64_t)s->below) : 0;
        values[e] = (tsh_real)ranks_number(seed, e);
        if (s->layout.kind != TSH_PARTIAL) continue;
        /* the last rank holds what the others' terms leave over */
        for (r = 0; r < size - 1 && rank == size - 1; r++)
            values[e] -= (tsh_real)ranks_number(seed + 100 + (uint64_t)r, e);
        if (rank < size - 1) values[e] = (tsh_real)ranks_number(seed + 100 + (uint64_t)rank, e);
    }
    if (t && s->layout.kind == TSH_PARTIAL)
        (void)tsh_write(ctx, t, TSH_LOCAL, values, n * sizeof *values);
    else if (t && s->below)
        (void)tsh_write(ctx, t, TSH_GLOBAL, ids, n * sizeof *ids);
    else if (t)
        (void)tsh_write(ctx, t, TSH_GLOBAL, values, n * sizeof *values);
    free(values);
    free(ids);
    return t;
}

/* Gives tensor t (a parameter, say) the global values of seed. */
UNUSED static tsh_result ranks_set(tsh_ctx *ctx, tsh_tensor *t, uint64_t seed) {
    size_t n = (size_t)tsh_numel(t), e;
    tsh_real *values = (tsh_real *)malloc((n + 1) * sizeof *values);
    tsh_result result;
    for (e = 0; e < n; e++) values[e] = (tsh_real)ranks_number(seed, e);
    result = tsh_write(ctx, t, TSH_GLOBAL, values, n * sizeof *values);
    free(values);
    return result;
}

/* The value of 16 bits of TSH_BF16. */
UNUSED static double ranks_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

/* A tensor's global values as doubles, to be freed; NULL on an error. Collective. */
UNUSED static double *ranks_values(tsh_ctx *ctx, tsh_tensor *t) {
    tsh_dtype dtype = tsh_dtype_of(t);
    size_t n = (size_t)tsh_numel(t), width = tsh_dtype_size(dtype), e;
    char *raw = (char *)malloc(n * width + 1);
    double *out = (double *)malloc((n + 1) * sizeof *out);
    if (!t || tsh_read(ctx, t, TSH_GLOBAL, raw, n * width) != TSH_OK) {
        free(raw);
        free(out);
        return NULL;
    }
    for (e = 0; e < n; e++)
        out[e] = dtype == TSH_I32   ? (double)((const int32_t *)(const void *)raw)[e]
                 : dtype == TSH_I64 ? (double)((const int64_t *)(const void *)raw)[e]
                 : dtype == TSH_BF16 ? ranks_bf16(((const uint16_t *)(const void *)raw)[e])
                                    : (double)((const tsh_real *)(const void *)raw)[e];
    free(raw);
    return out;
}

/* ------------------------------------------- a function's values and gradients */

/* What is compared: the output, and the gradient of each input or parameter. */
typedef struct capture {
    int count;
    int64_t numel[1 + RANKS_INPUTS + RANKS_WATCHED];
    double *values[1 + RANKS_INPUTS + RANKS_WATCHED];
} capture;

UNUSED static void capture_free(capture *c) {
    int i;
    for (i = 0; i < c->count; i++) free(c->values[i]);
    memset(c, 0, sizeof *c);
}

/* Appends t's global values; 1 where there are none. */
UNUSED static int capture_add(tsh_ctx *ctx, capture *c, tsh_tensor *t) {
    c->numel[c->count] = tsh_numel(t);
    c->values[c->count] = t ? ranks_values(ctx, t) : NULL;
    return !c->values[c->count++];
}

/* sum(y * w) over small integers w, complete on every rank: a loss whose gradient is w. */
UNUSED static tsh_tensor *ranks_loss(tsh_ctx *ctx, tsh_tensor *y) {
    tsh_tensor *w = tsh_zeros(ctx, tsh_shape_of(y));
    tsh_real *values = (tsh_real *)tsh_data(ctx, w);
    int64_t e;
    for (e = 0; values && e < tsh_numel(w); e++)
        values[e] = (tsh_real)ranks_number(77, (uint64_t)e);
    if (tsh_layout_of(y).kind == TSH_SHARDED) w = tsh_redistribute(w, tsh_layout_of(y));
    return tsh_redistribute(tsh_sum(tsh_mul(y, w), TSH_ALL, 0), tsh_replicated());
}

/* 0 where `got` equals `want`; tolerance relative to max(1, |want|). */
UNUSED static int capture_compare(tsh_ctx *ctx, const char *name, const capture *want,
                                  const capture *got, double tolerance) {
    int i;
    int64_t e;
    CHECK(want->count == got->count, "%s: %d tensors, not %d", name, got->count, want->count);
    for (i = 0; i < want->count; i++) {
        CHECK(want->numel[i] == got->numel[i], "%s: tensor %d has %ld elements, not %ld", name, i,
              (long)got->numel[i], (long)want->numel[i]);
        for (e = 0; e < want->numel[i]; e++) {
            double a = want->values[i][e], b = got->values[i][e];
            double scale = fabs(a) > 1 ? fabs(a) : 1;
            CHECK(a == b || fabs(a - b) <= tolerance * scale || (a != a && b != b),
                  "%s: %s %d, element %ld is %.9g, not %.9g", name,
                  i ? "gradient of input" : "output", i ? i - 1 : 0, (long)e, b, a);
        }
    }
    return 0;
}

/* A model's parameters by path, their gradients and their values; taken at moments of one's own by
 * tsh_each_param. */
typedef struct kept_params {
    int count;
    char path[RANKS_PARAMS][TSH_PATH_SIZE];
    capture gradient[RANKS_PARAMS], value[RANKS_PARAMS];
} kept_params;

UNUSED static int params_find(const kept_params *kept, const char *path) {
    int i = 0;
    while (i < kept->count && strcmp(kept->path[i], path) != 0) i++;
    return i;
}

UNUSED static int params_place(kept_params *kept, const char *path) {
    const int i = params_find(kept, path);
    (void)snprintf(kept->path[i], TSH_PATH_SIZE, "%s", path);
    if (i == kept->count) kept->count++;
    return i;
}

UNUSED static void params_keep_gradient(const char *path, tsh_tensor *param, void *user) {
    kept_params *kept = (kept_params *)user;
    const int i = params_place(kept, path);
    (void)capture_add(tsh_ctx_of(param), &kept->gradient[i], tsh_grad(param));
}

UNUSED static void params_keep_value(const char *path, tsh_tensor *param, void *user) {
    kept_params *kept = (kept_params *)user;
    const int i = params_place(kept, path);
    (void)capture_add(tsh_ctx_of(param), &kept->value[i], param);
}

UNUSED static void params_free(kept_params *kept) {
    int i;
    for (i = 0; i < kept->count; i++) {
        capture_free(&kept->gradient[i]);
        capture_free(&kept->value[i]);
    }
    kept->count = 0;
}

/* 0 where what is there of `got` equals the same of `want`; a tolerance below 0: not compared. */
UNUSED static int params_compare(tsh_ctx *ctx, const kept_params *want, const kept_params *got,
                                 double gradients, double values) {
    int i, w;
    for (i = 0; i < got->count; i++) {
        w = params_find(want, got->path[i]);
        CHECK(w < want->count, "%s is no parameter", got->path[i]);
        if (gradients >= 0 &&
            capture_compare(ctx, got->path[i], &want->gradient[w], &got->gradient[i], gradients))
            return 1;
        if (values >= 0 &&
            capture_compare(ctx, got->path[i], &want->value[w], &got->value[i], values))
            return 1;
    }
    return 0;
}

/* -------------------------------------------------------------------- trials
 * A trial is a function of tensors, their layouts, the layout of its result and, if wanted, the
 * collectives it may run. It is run densely on one rank and then at every degree, for every length
 * n, with its inputs as leaves and as results of an op; all must agree. */

enum { PROBE_ARG = 64 };

typedef struct probe {
    tsh_ctx *ctx;
    const char *arg;
    char unread[PROBE_ARG];             /* arg, with blanks where a function has read it */
    int64_t n;
    int dense;                          /* on one rank, everything replicated */
    int number;                         /* a number that no other probe of this ctx has */
    tsh_tensor *in[RANKS_INPUTS];       /* NULL where there is none */
    tsh_tensor *watched[RANKS_WATCHED]; /* parameters and such: their gradients are compared too */
} probe;

typedef tsh_tensor *(*trial_fn)(probe *p);

/* A trial function looks up the words of its row's argument with probe_has and probe_number, or
 * takes the whole argument with probe_arg and returns NULL if it does not know it. A word that is
 * never looked up fails the row: it is misspelt, so the row would test something else. */
UNUSED static void probe_begin(probe *p, const char *arg) {
    p->arg = arg;
    if (strlen(arg) >= sizeof p->unread) spec_refuse(arg);
    (void)snprintf(p->unread, sizeof p->unread, "%s", arg);
}

/* Where whole words, one or several, stand in the argument; NULL: nowhere. */
UNUSED static const char *probe_find(probe *p, const char *words) {
    size_t length = strlen(words);
    const char *at = p->arg;
    while ((at = strstr(at, words)) != NULL &&
           ((at > p->arg && at[-1] != ' ') || (at[length] && at[length] != ' ')))
        at++;
    if (at) memset(p->unread + (at - p->arg), ' ', length);
    return at;
}

UNUSED static int probe_has(probe *p, const char *words) {
    return probe_find(p, words) != NULL;
}

/* The number after a word, a multiple of n perhaps; 0 where the word is not there. */
UNUSED static int64_t probe_number(probe *p, const char *word) {
    const char *at = probe_find(p, word), *begin;
    int64_t size, sign;
    if (!at) return 0;
    begin = at += strlen(word) + (at[strlen(word)] == ' ');
    sign = *at == '-' ? -1 : 1;
    at += *at == '-';
    size = sign * spec_size(&at, p->n);
    memset(p->unread + (begin - p->arg), ' ', (size_t)(at - begin));
    return size;
}

UNUSED static const char *probe_arg(probe *p) {
    memset(p->unread, ' ', strlen(p->unread));
    return p->arg;
}

/* What nobody has read, from its first word on; NULL: all of it was. */
UNUSED static const char *probe_unread(const probe *p) {
    const char *at = p->unread + strspn(p->unread, " ");
    return *at ? at : NULL;
}

enum { TRIAL_VALUES = 1, TRIAL_COUNTED = 2 }; /* no gradient; collectives are counted */
enum { TRIAL_REDUCES, TRIAL_GATHERS, TRIAL_SCATTERS, TRIAL_KINDS };

typedef struct trial {
    trial_fn fn;
    const char *arg, *in[RANKS_INPUTS];
    const char *out; /* NULL: any layout */
    double tolerance;
    int flags;
    /* all-reduces, all-gathers, reduce-scatters of fn, and of tsh_backward with inputs from ops */
    int forward[TRIAL_KINDS], backward[TRIAL_KINDS];
} trial;

/* A row: the inputs' texts come last. */
/* clang-format off */
#define TRIAL(fn, arg, out, tolerance, flags, ...) \
    {fn, arg, {__VA_ARGS__}, out, tolerance, flags, {0}, {0}}
/* clang-format on */

/* Anything else that must give the same at every degree: fn appends what it found to got. */
typedef int (*same_fn)(tsh_ctx *ctx, int dense, capture *got);

typedef struct same_run {
    same_fn fn;
    int dense;
    double tolerance;
    capture *want;
} same_run;

UNUSED static int same_rank(tsh_ctx *ctx, void *user) {
    const same_run *run = (const same_run *)user;
    capture got;
    int failed;
    memset(&got, 0, sizeof got);
    if (run->fn(ctx, run->dense, &got)) return 1;
    CHECK_OK();
    if (run->dense) *run->want = got;
    failed = !run->dense && capture_compare(ctx, "", run->want, &got, run->tolerance);
    if (!run->dense) capture_free(&got);
    return failed;
}

UNUSED static void same_prove(same_fn fn, double tolerance) {
    capture want;
    same_run run;
    int i;
    run.fn = fn;
    run.tolerance = tolerance;
    run.want = &want;
    run.dense = 1;
    ranks_run(1, same_rank, &run);
    run.dense = 0;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], same_rank, &run);
    capture_free(&want);
}

/* A leaf from text; dense: replicated. */
UNUSED static tsh_tensor *same_leaf(tsh_ctx *ctx, int dense, const char *text, int64_t n,
                                    uint64_t seed) {
    spec s = spec_parse(text, n);
    if (dense) s.layout = tsh_replicated();
    return tsh_requires_grad(spec_tensor(ctx, &s, seed), 1);
}

typedef struct trial_run {
    const trial *rows;
    int count, lengths, dense;
    const int64_t *length;
    capture *want; /* per row, length and way */
} trial_run;

UNUSED static void trial_describe(const trial *t, int64_t n, int way, char *text, size_t size) {
    int i;
    (void)snprintf(text, size, "%s(", t->arg);
    for (i = 0; i < RANKS_INPUTS && t->in[i]; i++)
        (void)snprintf(text + strlen(text), size - strlen(text), i ? "; %s" : "%s", t->in[i]);
    (void)snprintf(text + strlen(text), size - strlen(text), ") to %s with n = %ld%s",
                   t->out ? t->out : "any", (long)n, way ? " through an op" : "");
}

/* Collectives of the tp group since *before. */
UNUSED static int trial_count(tsh_ctx *ctx, const char *name, const tsh_comm_stats *before,
                              const int *want) {
    static const tsh_coll_kind kinds[] = {TSH_ALLREDUCE, TSH_ALLGATHER, TSH_REDUCE_SCATTER};
    const tsh_comm_stats *now = &tsh_tp(ctx)->stats;
    int i;
    for (i = 0; i < TRIAL_KINDS && tsh_tp(ctx)->size > 1; i++) {
        int calls = (int)(now->calls[kinds[i]] - before->calls[kinds[i]]);
        CHECK(calls == want[i], "%s: %d calls of kind %d, not %d", name, calls, i, want[i]);
    }
    return 0;
}

/* A leaf's gradient is replicated where the leaf is replicated or partial, else sharded alike. */
UNUSED static int trial_gradient(tsh_ctx *ctx, const char *name, tsh_tensor *leaf, capture *got) {
    tsh_layout want = tsh_layout_of(leaf), have;
    tsh_tensor *grad = tsh_grad(leaf);
    CHECK(grad, "%s: there is no gradient %d", name, got->count - 1);
    if (want.kind == TSH_PARTIAL) want = tsh_replicated();
    have = tsh_layout_of(grad);
    CHECK(spec_same_layout(&want, &have, tsh_shape_of(leaf), tsh_tp(ctx)->size),
          "%s: layout of gradient %d", name, got->count - 1);
    CHECK(!capture_add(ctx, got, grad), "%s: gradient %d", name, got->count - 1);
    return 0;
}

UNUSED static int trial_backward(const trial *t, probe *p, int way, const char *name,
                                 tsh_tensor *out, tsh_tensor **leaf, capture *got) {
    tsh_ctx *ctx = p->ctx;
    tsh_tensor *loss = ranks_loss(ctx, out);
    tsh_comm_stats before = tsh_tp(ctx)->stats;
    int i;
    CHECK(tsh_backward(ctx, loss) == TSH_OK, "%s", name);
    if ((t->flags & TRIAL_COUNTED) && way && trial_count(ctx, name, &before, t->backward)) return 1;
    for (i = 0; i < RANKS_INPUTS; i++)
        if (leaf[i] && tsh_dtype_of(leaf[i]) == TSH_REAL && trial_gradient(ctx, name, leaf[i], got))
            return 1;
    for (i = 0; i < RANKS_WATCHED; i++)
        if (p->watched[i] && trial_gradient(ctx, name, p->watched[i], got)) return 1;
    return 0;
}

/* way 1: the inputs are results of an op, so that their gradients are completed in flight. */
UNUSED static int trial_once(tsh_ctx *ctx, const trial *t, probe *p, int way, capture *got) {
    tsh_tensor *leaf[RANKS_INPUTS] = {NULL}, *out;
    tsh_comm_stats before;
    char name[256];
    int i;
    trial_describe(t, p->n, way, name, sizeof name);
    for (i = 0; i < RANKS_INPUTS && t->in[i]; i++) {
        spec s = spec_parse(t->in[i], p->n);
        if (p->dense) s.layout = tsh_replicated();
        p->in[i] = leaf[i] = spec_tensor(ctx, &s, 10 + (uint64_t)i);
        CHECK(leaf[i], "%s: input %d cannot be made", name, i);
        if (!s.below) tsh_requires_grad(leaf[i], 1);
        if (!s.below && way) p->in[i] = tsh_scale(leaf[i], 2);
    }
    before = tsh_tp(ctx)->stats;
    out = t->fn(p);
    CHECK(out, "%s", name);
    CHECK(p->dense || !probe_unread(p), "%s: nothing reads \"%s\"", name, probe_unread(p));
    if ((t->flags & TRIAL_COUNTED) && trial_count(ctx, name, &before, t->forward)) return 1;
    if (t->out && !p->dense) {
        tsh_layout want = spec_layout(t->out, p->n), have = tsh_layout_of(out);
        char text[96];
        CHECK(spec_same_layout(&want, &have, tsh_shape_of(out), tsh_tp(ctx)->size), "%s: gives %s",
              name, tsh_layout_text(have, text, sizeof text));
    }
    CHECK(!capture_add(ctx, got, out), "%s", name);
    if (!(t->flags & TRIAL_VALUES) && trial_backward(t, p, way, name, out, leaf, got)) return 1;
    CHECK(tsh_step_end(ctx) == TSH_OK, "%s", name);
    for (i = 0; i < RANKS_INPUTS; i++) tsh_tensor_free(leaf[i]);
    return 0;
}

UNUSED static int trial_walk(tsh_ctx *ctx, void *user) {
    const trial_run *run = (const trial_run *)user;
    int e, each = run->lengths * 2;
    for (e = 0; e < run->count * each; e++) {
        const trial *t = &run->rows[e / each];
        int way = e % 2;
        capture got;
        probe p;
        char name[256];
        memset(&got, 0, sizeof got);
        memset(&p, 0, sizeof p);
        p.ctx = ctx;
        probe_begin(&p, t->arg);
        p.n = run->length[e % each / 2];
        p.dense = run->dense;
        p.number = e;
        trial_describe(t, p.n, way, name, sizeof name);
        if (trial_once(ctx, t, &p, way, &got)) return 1;
        if (run->dense)
            run->want[e] = got;
        else if (capture_compare(ctx, name, &run->want[e], &got, t->tolerance))
            return 1;
        else
            capture_free(&got);
    }
    return 0;
}

UNUSED static void trials_prove(const trial *rows, int count, const int64_t *length, int lengths) {
    trial_run run;
    int i, n = count * lengths * 2;
    run.rows = rows;
    run.count = count;
    run.length = length;
    run.lengths = lengths;
    run.want = (capture *)calloc((size_t)n, sizeof *run.want);
    run.dense = 1;
    ranks_run(1, trial_walk, &run);
    run.dense = 0;
    for (i = 0; i < COUNT(ranks_degrees); i++) ranks_run(ranks_degrees[i], trial_walk, &run);
    for (i = 0; i < n; i++) capture_free(&run.want[i]);
    free(run.want);
}

#endif
