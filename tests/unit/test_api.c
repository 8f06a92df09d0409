/* Every public function with NULL, stale and foreign handles, 0, -1, and the least and greatest
 * numbers, in its arguments and in the fields of its descriptions: an error or a result, no crash.
 * Run it under the address and undefined-behaviour sanitizers (make asan only=unit/test_api).
 *
 * What a caller must get right is not tried: that an array has as many elements as its count says,
 * that a pointer leads to something of its type that is still there.
 *
 * API_CALL=tsh_add in the environment calls that function alone, and tells of every call. */
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../../tshard.h"
#include "../../backends/tshard_threads.h"

#include "../support/files.h"

#ifndef FIELDS
#define FIELDS 2
#endif
#ifndef RANDOM_CALLS
#define RANDOM_CALLS 40
#endif
enum {  CALLS_WANTED = 15000, ARGUMENTS = 10, OWNED = 256, TENSOR_KINDS = 18 };
static const size_t memory_limit = (size_t)1 << 22; /* bytes of an allocation of a ctx */

/* What a value is; see fill. */
typedef enum api_kind {
    INT,
    LONG,
    SIZE,
    WORD,
    DOUBLE,
    ENUM,
    COUNT, /* of an array that is passed beside it */
    DTYPE,
    SHAPE,
    LAYOUT,
    CTX,
    OUT_CTX,
    TENSOR,
    TENSORS,
    MODULE,
    OPTIM,
    EMA,
    OUTER,
    CACHE,
    PIPELINE,
    COMM,
    OUT_COMM,
    TEXT, /* a string, or a buffer for one */
    FORMAT,
    NAMES,
    BUFFER,
    OUTPUT, /* a buffer apart from that of BUFFER */
    LONGS,
    INTS,
    DOUBLES,
    STREAM,
    LAYOUT_AT,
    LAYOUTS,
    SEGMENTS,
    RANGES,
    ERROR_AT,
    REQ_AT,
    LOGGER,
    WRITER,
    USER,
    FUNCTION,
    STRUCT
} api_kind;

typedef void (*api_function)(void);
typedef struct api_value {
    api_kind kind;
    int which; /* of STRUCT: an index of structs; of FUNCTION: of stubs */
    const char *name;
} api_value;
typedef struct api_field {
    size_t offset;
    api_value value;
} api_field;
typedef struct api_struct {
    const char *name;
    size_t size;
    const api_field *fields;
    size_t count;
} api_struct;
typedef struct api_call {
    const char *name;
    void (*call)(void *const *arguments); /* the address of each */
    int count;
    api_value argument[ARGUMENTS];
} api_call;

/* What a call may be given; made anew for each. */
typedef struct world {
    tsh_ctx *ctx, *other, *opened;
    tsh_tensor *tensor[TENSOR_KINDS];
    tsh_optim *optim, *freed_optim, *other_optim;
    tsh_ema *ema, *freed_ema, *other_ema;
    tsh_outer *outer, *freed_outer, *other_outer;
    tsh_cache *cache, *freed_cache;
    tsh_pipeline *pipeline;
    tsh_comm split, closed;
    tsh_writer writer; /* not open */
    uint64_t more;      /* not 0: one more field of each description has a random value */
    void *owned[OWNED]; /* blocks of malloc, freed at the end */
    int count;
} world;

/* -- functions of the caller's own ------------------------------------------ */

static int stub_tsh_run_fn(tsh_ctx *ctx, void *user) {
    (void)user;
    return !tsh_ok(ctx);
}
static int stub_tsh_run_on_fn(tsh_ctx *ctx, void *user) {
    return stub_tsh_run_fn(ctx, user);
}
static int stub_tsh_run_built_fn(tsh_ctx *ctx, void *user) {
    return stub_tsh_run_fn(ctx, user);
}
static int stub_tsh_run_on_built_fn(tsh_ctx *ctx, void *user) {
    return stub_tsh_run_fn(ctx, user);
}
static void stub_tsh_each_param_fn(const char *path, tsh_tensor *param, void *user) {
    (void)path, (void)param, (void)user;
}
static tsh_tensor *stub_tsh_gradcheck_fn(tsh_ctx *ctx, tsh_tensor **in, int n, void *user) {
    (void)ctx, (void)user;
    return n > 0 ? tsh_sum(in[0], TSH_ALL, 0) : NULL;
}
static tsh_tensor *stub_tsh_chunks_desc_fn(tsh_tensor *x, tsh_tensor *target, void *user) {
    (void)target, (void)user;
    return x;
}
static void stub_tsh_custom_op_desc_forward(tsh_tensor *const *in, int n, void *const *out,
                                            void *user) {
    (void)user, (void)in, (void)n, (void)out;
}
static void stub_tsh_custom_op_desc_backward(tsh_tensor *const *in, int n, const void *const *out,
                                             const tsh_real *const *grad_out,
                                             tsh_real *const *grad_in, void *user) {
    (void)user, (void)in, (void)n, (void)out, (void)grad_out, (void)grad_in;
}
static tsh_tensor *stub_tsh_module_desc_forward(tsh_module *module, tsh_tensor **in, int n,
                                                void *user) {
    (void)module, (void)user;
    return n > 0 ? in[0] : NULL;
}
static tsh_tensor *stub_tsh_pipeline_desc_input(tsh_ctx *ctx, int micro_batch, void *user) {
    (void)micro_batch, (void)user;
    return tsh_ones(ctx, tsh_shape2(4, 4));
}
static tsh_tensor *stub_tsh_pipeline_desc_loss(tsh_ctx *ctx, tsh_tensor *y, int micro_batch,
                                               void *user) {
    (void)ctx, (void)micro_batch, (void)user;
    return tsh_mean(y, TSH_ALL, 0);
}
static double stub_tsh_pipeline_desc_weight(tsh_ctx *ctx, int micro_batch, void *user) {
    (void)ctx, (void)micro_batch, (void)user;
    return 1;
}
static double stub_tsh_schedule_factor(int64_t t, void *user) {
    (void)user;
    return 1 / (double)(1 + t);
}
static void stub_tsh_custom_optim_update(const tsh_update *update, void *user) {
    (void)update, (void)user;
}
static int64_t stub_tsh_file_desc_read_at(int64_t at, void *to, int64_t bytes, void *user) {
    (void)user, (void)at, (void)to, (void)bytes;
    return -1;
}
static void stub_tsh_hasher_begin(void *state) {
    (void)state;
}
static void stub_tsh_hasher_add(void *state, const void *bytes, size_t count) {
    (void)state, (void)bytes, (void)count;
}
static void stub_tsh_hasher_end(void *state, unsigned char hash[32]) {
    (void)state;
    memset(hash, 0, 32);
}
static int stub_tsh_trace_desc_print(const char *text, size_t size, void *user) {
    (void)user, (void)text, (void)size;
    return 1;
}
static int64_t stub_tsh_trace_desc_now(void *user) {
    (void)user;
    return 1;
}

/* Reads a string that a call returned. */
static void use_text(const char *text) {
    assert_true(!text || strlen(text) < 4096);
}

/* Closes a file that a call opened. */
static void use_file(FILE *file) {
    if (file) assert_int_equal(fclose(file), 0);
}

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wformat-nonliteral" /* of tsh_fail and tsh_log_message */
#endif
#include "api_calls.h"

/* -- a world ---------------------------------------------------------------- */

static void *allocate(void *ptr, size_t old_size, size_t new_size, size_t align, void *user) {
    void *block = NULL;
    if (new_size && (new_size > memory_limit || posix_memalign(&block, align, new_size)))
        return NULL;
    if (ptr && block) memcpy(block, ptr, old_size < new_size ? old_size : new_size);
    free(ptr);
    (void)user;
    return block;
}

static void take_message(const char *message, void *user) {
    (void)user;
    assert_null(strstr(message, "(null)"));
}

static tsh_ctx *open_ctx(void) {
    tsh_desc desc;
    tsh_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.allocator.allocate = allocate;
    desc.logger.log = take_message;
    assert_int_equal(tsh_open(&desc, &ctx), TSH_OK);
    return ctx;
}

/* Layers that take (4, 4). */
static void add_model(tsh_ctx *ctx) {
    tsh_linear_desc linear;
    tsh_embedding_desc embedding;
    tsh_attention_layer_desc attention;
    tsh_module *container;
    memset(&linear, 0, sizeof linear);
    memset(&embedding, 0, sizeof embedding);
    memset(&attention, 0, sizeof attention);
    linear.in = linear.out = 4;
    embedding.count = embedding.dim = 4;
    attention.dim = 4;
    attention.heads = 2;
    (void)tsh_add_linear(tsh_root(ctx), "up", &linear);
    (void)tsh_add_embedding(tsh_root(ctx), "table", &embedding);
    (void)tsh_add_attention(tsh_root(ctx), "attn", &attention);
    container = tsh_add_module(tsh_root(ctx), "h", NULL);
    (void)tsh_add_linear(container, "0", &linear);
    (void)tsh_add_dropout(container, "1", 0.5);
}

static tsh_tensor *owned_of(tsh_ctx *ctx, tsh_dtype dtype, tsh_shape shape, tsh_layout layout) {
    return tsh_tensor_new(ctx, dtype, shape, layout);
}

/* The tensors; by their place, see default_tensor. */
static void make_tensors(world *w) {
    tsh_tensor **t = w->tensor;
    tsh_ctx *ctx = w->ctx;
    tsh_tensor *spent;
    int i = 0;
    t[i++] = tsh_requires_grad(tsh_tensor_new(ctx, TSH_F32, tsh_shape2(4, 4), tsh_replicated()), 1);
    t[i++] = tsh_requires_grad(tsh_tensor_new(ctx, TSH_F32, tsh_shape1(4), tsh_replicated()), 1);
    t[i++] = tsh_tensor_new(ctx, TSH_F32, tsh_shape0(), tsh_replicated());
    t[i++] = tsh_tensor_new(ctx, TSH_I64, tsh_shape1(4), tsh_replicated());
    t[i++] = tsh_tensor_new(ctx, TSH_I32, tsh_shape2(4, 4), tsh_replicated());
    t[i++] = tsh_tensor_new(ctx, TSH_F32, tsh_shape4(1, 2, 4, 4), tsh_replicated());
    t[i++] = NULL;
    t[i++] = tsh_tensor_new(ctx, TSH_F32, tsh_shape2(4, 4), tsh_replicated());
    tsh_tensor_free(t[i - 1]); /* stale */
    tsh_scope_begin(ctx);
    t[i++] = tsh_ones(ctx, tsh_shape2(4, 4));
    tsh_scope_end(ctx); /* a stale step tensor */
    spent = tsh_scale(t[0], 2);
    (void)tsh_backward(ctx, tsh_sum(tsh_exp(spent), TSH_ALL, 0));
    t[i++] = spent; /* its values were given back by backward */
    t[i++] = tsh_tensor_new(w->other, TSH_F32, tsh_shape2(4, 4), tsh_replicated());
    t[i++] = tsh_tensor_new(ctx, TSH_F32, tsh_shape2(0, 3), tsh_replicated());
    t[i++] = tsh_tensor_new(ctx, TSH_BF16, tsh_shape2(4, 4), tsh_replicated());
    t[i++] = owned_of(ctx, TSH_F32, tsh_shape2(4, 4), tsh_sharded(0));
    t[i++] = tsh_redistribute(t[0], tsh_partial());
    t[i++] = tsh_param(tsh_root(ctx), "up.weight");
    t[i++] = tsh_exp(t[0]); /* of a tape */
    t[i++] = tsh_sum(t[0], TSH_ALL, 0);
    assert_int_equal(i, TENSOR_KINDS);
}

/* variant: 0: a model alone; 1: with an optimiser; 2: with a cache, and without gradients; 3: in a
 * pipeline. */
static void begin(world *w, int variant) {
    tsh_pipeline_desc desc;
    tsh_outer_desc outer;
    memset(w, 0, sizeof *w);
    w->ctx = open_ctx();
    w->other = open_ctx();
    add_model(w->ctx);
    if (variant == 1) {
        w->freed_optim = tsh_optim_new(tsh_root(w->ctx), NULL);
        tsh_optim_free(w->freed_optim);
        w->optim = tsh_optim_new(tsh_root(w->ctx), NULL);
        add_model(w->other);
        w->other_optim = tsh_optim_new(tsh_root(w->other), NULL);
        w->freed_ema = tsh_ema_new(tsh_root(w->ctx), 0);
        tsh_ema_free(w->freed_ema);
        w->ema = tsh_ema_new(tsh_root(w->ctx), 0.9);
        (void)tsh_ema_update(w->ema);
        w->other_ema = tsh_ema_new(tsh_root(w->other), 0.9);
        memset(&outer, 0, sizeof outer);
        outer.every = 2;
        w->freed_outer = tsh_outer_new(tsh_root(w->ctx), w->optim, &outer);
        tsh_outer_free(w->freed_outer);
        w->outer = tsh_outer_new(tsh_root(w->ctx), w->optim, &outer);
        w->other_outer = tsh_outer_new(tsh_root(w->other), w->other_optim, &outer);
    } else if (variant == 2) {
        w->freed_cache = tsh_cache_new(tsh_root(w->ctx), 2, 8, TSH_DTYPE_DEFAULT);
        tsh_cache_free(w->freed_cache);
        w->cache = tsh_cache_new(tsh_root(w->ctx), 2, 8, TSH_DTYPE_DEFAULT);
    } else if (variant == 3) {
        memset(&desc, 0, sizeof desc);
        desc.micro_batches = 2;
        desc.input = stub_tsh_pipeline_desc_input;
        desc.loss = stub_tsh_pipeline_desc_loss;
        w->pipeline = tsh_pipeline_new(tsh_find(tsh_root(w->ctx), "h"), &desc);
    }
    if (variant != 3) make_tensors(w); /* else: no tape */
    if (variant == 2) tsh_no_grad_begin(w->ctx);
    if (!tsh_ok(w->ctx)) fail_msg("%s", tsh_last_error(w->ctx)->message);
}

static void end(world *w) {
    (void)tsh_step_end(w->ctx);
    tsh_close(w->ctx);
    (void)tsh_step_end(w->other);
    tsh_close(w->other);
    tsh_close(w->opened);
    tsh_comm_close(&w->split);
    (void)tsh_writer_close(&w->writer, 0);
    while (w->count) free(w->owned[--w->count]);
}

/* A block of its own, so that the address sanitizer sees where it ends. */
static void *block_of(world *w, const void *from, size_t size) {
    void *block = calloc(1, size);
    assert_non_null(block);
    assert_true(w->count < OWNED);
    w->owned[w->count++] = block;
    if (from) memcpy(block, from, size);
    return block;
}

/* -- values ----------------------------------------------------------------- */

static const int ints[] = {1, 0, 2, 4, -1, INT_MIN, INT_MAX};
static const int counts[] = {1, 0, 2, -1, INT_MIN};
static const int enums[] = {0, 1, 2, 3, 6, -1, INT_MAX};
static const int64_t longs[] = {4, 0, 1, 2, -1, INT64_MIN, INT64_MAX};
static const size_t sizes[] = {64, 0, 1, 4096, SIZE_MAX};
static const uint32_t words[] = {(uint32_t)sizeof(tsh_coll), 0, UINT32_MAX};
static const double doubles[] = {0.5,    0,        -1,          1,
                                 1e308,  -1e308,   TSH_ZERO,    4e-324,
                                 (double)NAN, (double)INFINITY, -(double)INFINITY};
static const int dtypes[] = {TSH_F32, TSH_DTYPE_DEFAULT, TSH_F64, TSH_BF16, TSH_F16,    TSH_I32,
                             TSH_I64, TSH_Q8_0,          TSH_Q4_1, 10,      -1, INT_MIN, INT_MAX};
static const tsh_shape shapes[] = {
    {2, {4, 4, 0, 0, 0, 0}},          {0, {0, 0, 0, 0, 0, 0}},
    {2, {0, 3, 0, 0, 0, 0}},          {1, {16, 0, 0, 0, 0, 0}},
    {6, {2, 2, 2, 2, 1, 1}},          {2, {-1, 4, 0, 0, 0, 0}},
    {2, {-1, -1, 0, 0, 0, 0}},        {1, {INT64_MIN, 0, 0, 0, 0, 0}},
    {1, {INT64_MAX, 0, 0, 0, 0, 0}},  {2, {INT64_MAX, INT64_MAX, 0, 0, 0, 0}},
    {3, {INT64_MAX, 0, 2, 0, 0, 0}},  {3, {-1, 0, 2, 0, 0, 0}},
    {-1, {4, 4, 4, 4, 4, 4}},         {7, {4, 4, 4, 4, 4, 4}},
    {INT_MAX, {4, 4, 4, 4, 4, 4}},    {INT_MIN, {4, 4, 4, 4, 4, 4}},
    {2, {(int64_t)1 << 40, 1, 0, 0, 0, 0}}};
static const tsh_layout layouts[] = {
    {TSH_REPLICATED, 0, 0, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_PARTIAL, 0, 0, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, 0, 1, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, -1, 2, {{0, 2}, {0, 2}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, INT_MIN, 1, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, INT_MAX, 1, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, 0, INT_MAX, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, 0, INT_MIN, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, 0, 4, {{INT64_MAX, 1}, {INT64_MAX, 1}, {INT64_MAX, 1}, {INT64_MAX, 1}}},
    {TSH_SHARDED, 0, 2, {{INT64_MIN, 1}, {-1, -1}, {0, 0}, {0, 0}}},
    {TSH_SHARDED, 0, 2, {{2, INT64_MAX}, {2, INT64_MIN}, {0, 0}, {0, 0}}},
    {(tsh_layout_kind)9, 0, 1, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
    {(tsh_layout_kind)-1, 0, 1, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}}};
static const char *const texts[] = {"up",     "weight", "h.0",   "**.weight", "model.safetensors",
                                    "",       "a.b",    "%n%s%d", "/",        "[",
                                    "\033[2J", "*.*.*.*.*.*.*.*.*.*"};
static const char *const formats[] = {"%d of a kind", "", "plain"};
static const int64_t many_longs[][8] = {{1, 1, 1, 1, 1, 1, 1, 1},
                                        {0, 0, 0, 0, 0, 0, 0, 0},
                                        {-1, -1, -1, -1, -1, -1, -1, -1},
                                        {INT64_MIN, 0, 0, 0, 0, 0, 0, 0},
                                        {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX, 0, 0, 0, 0}};
static const int many_ints[][8] = {{1, 0, 2, 3, 4, 5, 6, 7},
                                   {0, 0, 0, 0, 0, 0, 0, 0},
                                   {-1, -2, -3, -4, 0, 0, 0, 0},
                                   {INT_MIN, INT_MAX, 0, 0, 0, 0, 0, 0}};
static const double many_doubles[][8] = {
    {1, 1, 1, 1, 1, 1, 1, 1}, {(double)NAN, (double)INFINITY, 1e308, 0, 0, 0, 0, 0}};

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof(array)[0]))

static int values_of(const api_value *value);

/* Values of a description: usual, NULL, zeros, and the usual one with each value of each field. */
static int values_of_struct(const api_struct *is) {
    int n = 3;
    for (size_t f = 0; f < is->count; f++) n += values_of(&is->fields[f].value);
    return n;
}

/* How many values there are to be tried. */
static int values_of(const api_value *value) {
    switch (value->kind) {
    case INT: return COUNT_OF(ints);
    case LONG: return COUNT_OF(longs);
    case SIZE: return COUNT_OF(sizes);
    case WORD: return COUNT_OF(words);
    case DOUBLE: return COUNT_OF(doubles);
    case ENUM: return COUNT_OF(enums);
    case COUNT: return COUNT_OF(counts);
    case DTYPE: return COUNT_OF(dtypes);
    case SHAPE: return COUNT_OF(shapes);
    case LAYOUT: return COUNT_OF(layouts);
    case CTX: return 3;
    case TENSOR: return TENSOR_KINDS + 1;
    case TENSORS: return 6;
    case MODULE: return 6;
    case OPTIM:
    case EMA:
    case OUTER:
    case CACHE: return 4;
    case PIPELINE: return 2;
    case COMM: return 4;
    case TEXT: return COUNT_OF(texts) + 3;
    case FORMAT: return COUNT_OF(formats) + 1;
    case NAMES: return 3;
    case LONGS: return COUNT_OF(many_longs) + 1;
    case INTS: return COUNT_OF(many_ints) + 1;
    case DOUBLES: return COUNT_OF(many_doubles) + 1;
    case LAYOUT_AT: return COUNT_OF(layouts) + 1;
    case LAYOUTS: return COUNT_OF(layouts) + 2;
    case SEGMENTS: return COUNT_OF(layouts) + 1;
    case STRUCT: return values_of_struct(&structs[value->which]);
    default: return 2; /* something, and NULL */
    }
}

/* The tensor that an argument of this name mostly is. */
static tsh_tensor *default_tensor(const world *w, const char *name) {
    static const struct {
        const char *name;
        int place;
    } places[] = {{"bias", 1}, {"weight", 1}, {"loss", 17}, {"ids", 3},      {"target", 3},
                  {"cond", 4}, {"q", 5},      {"k", 5},     {"v", 5},        {"cache_k", 6},
                  {"mask", 6}, {"cache_v", 6}, {"sinks", 6}, {"attention.mask", 6},
                  {"attention.cache_k", 6}, {"attention.cache_v", 6}, {"attention.sinks", 6},
                  {"previous", 6}};
    for (int i = 0; i < COUNT_OF(places); i++)
        if (strcmp(places[i].name, name) == 0) return w->tensor[places[i].place];
    return w->tensor[0];
}

static tsh_module *module_of(world *w, int pick) {
    switch (pick) {
    case 0: return tsh_root(w->ctx);
    case 1: return tsh_find(tsh_root(w->ctx), "up");
    case 2: return tsh_find(tsh_root(w->ctx), "h");
    case 3: return tsh_find(tsh_root(w->ctx), "attn");
    case 4: return tsh_root(w->other);
    default: return NULL;
    }
}

static const void *tensors_of(world *w, int pick) {
    tsh_tensor *in[TSH_MAX_OUTPUTS];
    if (pick == 5) return NULL;
    for (int i = 0; i < TSH_MAX_OUTPUTS; i++)
        in[i] = pick == 0   ? w->tensor[0]
                : pick == 1 ? w->tensor[5]
                : pick == 2 ? NULL
                : pick == 3 ? w->tensor[7 + i % 4] /* stale ones, and a foreign one */
                            : w->tensor[i % 4];
    return block_of(w, in, sizeof in);
}

static const void *text_of(world *w, int pick) {
    char line[4096] = "";
    if (pick < COUNT_OF(texts)) memcpy(line, texts[pick], strlen(texts[pick]));
    else if (pick == COUNT_OF(texts)) return NULL;
    else memset(line, pick == COUNT_OF(texts) + 1 ? 'a' : '.', sizeof line - 1); /* a long one */
    return block_of(w, line, sizeof line);
}

static const void *layouts_of(world *w, int pick) {
    const tsh_layout *in[4] = {NULL, NULL, NULL, NULL};
    if (pick == COUNT_OF(layouts) + 1) return NULL;
    for (int i = 0; i < 4 && pick < COUNT_OF(layouts); i++) in[i] = &layouts[pick];
    return block_of(w, in, sizeof in);
}

static const void *names_of(world *w, int pick) {
    const char *const in[2] = {pick == 0 ? "**.inv_freq" : "[", NULL};
    return pick == 2 ? NULL : block_of(w, in, sizeof in);
}

static const void *struct_of(world *w, int which, int pick);

/* The value `pick` of a kind that is an address. */
static const void *pointer_of(world *w, const api_value *value, int pick) {
    switch (value->kind) {
    case CTX: return pick == 0 ? w->ctx : pick == 1 ? w->other : NULL;
    case OUT_CTX: return pick ? NULL : &w->opened;
    case TENSOR: return pick ? w->tensor[pick - 1] : default_tensor(w, value->name);
    case TENSORS: return tensors_of(w, pick);
    case MODULE: return module_of(w, pick);
    case OPTIM:
        if (pick == 1) return w->freed_optim;
        return pick == 0 ? w->optim : pick == 2 ? w->other_optim : NULL;
    case EMA:
        if (pick == 1) return w->freed_ema;
        return pick == 0 ? w->ema : pick == 2 ? w->other_ema : NULL;
    case OUTER:
        if (pick == 1) return w->freed_outer;
        return pick == 0 ? w->outer : pick == 2 ? w->other_outer : NULL;
    case CACHE: return pick == 0 ? w->cache : pick == 1 ? w->freed_cache : NULL;
    case PIPELINE: return pick ? NULL : w->pipeline;
    case COMM:
        if (pick == 1) return tsh_tp(NULL);
        return pick == 0 ? tsh_tp(w->ctx) : pick == 2 ? &w->closed : NULL;
    case OUT_COMM: return pick ? NULL : &w->split;
    case TEXT: return text_of(w, pick);
    case FORMAT: return pick < COUNT_OF(formats) ? formats[pick] : NULL;
    case NAMES: return names_of(w, pick);
    case LONGS: return pick < COUNT_OF(many_longs) ? many_longs[pick] : NULL;
    case INTS: return pick < COUNT_OF(many_ints) ? many_ints[pick] : NULL;
    case DOUBLES: return pick < COUNT_OF(many_doubles)
                             ? block_of(w, many_doubles[pick], sizeof many_doubles[pick]) : NULL;
    case STREAM: return pick ? NULL : stdout;
    case LAYOUT_AT: return pick < COUNT_OF(layouts) ? &layouts[pick] : NULL;
    case SEGMENTS: return pick < COUNT_OF(layouts) ? layouts[pick].segment : NULL;
    case LAYOUTS: return layouts_of(w, pick);
    case STRUCT: return struct_of(w, value->which, pick);
    case BUFFER:
    case OUTPUT:
    case USER: return pick ? NULL : block_of(w, NULL, 4096);
    case RANGES: return pick ? NULL : block_of(w, NULL, TSH_MAX_SEGMENTS * sizeof(tsh_range));
    case ERROR_AT: return pick ? NULL : block_of(w, NULL, sizeof(tsh_error));
    case REQ_AT: return pick ? NULL : block_of(w, NULL, sizeof(tsh_req));
    case LOGGER: return pick ? NULL : block_of(w, NULL, sizeof(tsh_logger));
    case WRITER: return pick ? NULL : &w->writer;
    default: return NULL;
    }
}

/* Writes the value `pick` to `to`; returns its bytes. */
static size_t fill(world *w, const api_value *value, int pick, void *to) {
    const void *pointer;
#define FILL(array) memcpy(to, &(array)[pick], sizeof(array)[pick]); return sizeof(array)[pick]
    switch (value->kind) {
    case INT: FILL(ints);
    case LONG: FILL(longs);
    case SIZE: FILL(sizes);
    case WORD: FILL(words);
    case DOUBLE: FILL(doubles);
    case ENUM: FILL(enums);
    case COUNT: FILL(counts);
    case DTYPE: FILL(dtypes);
    case SHAPE: FILL(shapes);
    case LAYOUT: FILL(layouts);
    case FUNCTION: {
        const api_function function = pick ? NULL : stubs[value->which];
        memcpy(to, &function, sizeof function);
        return sizeof function;
    }
    default:
        pointer = pointer_of(w, value, pick);
        memcpy(to, &pointer, sizeof pointer);
        return sizeof pointer;
    }
#undef FILL
}

/* Fields that are not zero in the usual description. Functions are set, but for those that take the
 * place of another option. */
static int is_usual(const char *name, const api_field *field) {
    static const char *const places[] = {"size", "in", "out", "dim", "hidden", "count", "classes",
                                         "heads", "micro_batches", "lr", "shape", "send", "recv",
                                         "send_counts", "recv_counts", "name", "weight", "blocks",
                                         "from", "to", "attn_qkv"};
    if (field->value.kind == FUNCTION)
        return strcmp(field->value.name, "read") != 0 && strcmp(field->value.name, "weight") != 0;
    if (strcmp(name, "tsh_cross_entropy_desc") == 0 || strcmp(name, "tsh_loss_desc") == 0 ||
        field->value.kind == TENSOR)
        return 0;
    if (strcmp(name, "tsh_plan_rule") == 0) return strcmp(field->value.name, "path") == 0;
    for (int i = 0; i < COUNT_OF(places); i++)
        if (strcmp(places[i], field->value.name) == 0) return 1;
    return 0;
}

static unsigned draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(*state >> 33);
}

/* A description: see values_of_struct. Two, the second of zeros, as lists of them end. */
static const void *struct_of(world *w, int which, int pick) {
    const api_struct *is = &structs[which];
    char *block;
    if (pick == 1) return NULL;
    block = (char *)block_of(w, NULL, 2 * is->size);
    for (size_t f = 0; f < is->count && pick != 2; f++)
        if (is_usual(is->name, &is->fields[f]))
            (void)fill(w, &is->fields[f].value, 0, block + is->fields[f].offset);
    pick -= 3;
    for (size_t f = 0; f < is->count && pick >= 0; f++) {
        const int n = values_of(&is->fields[f].value);
        if (pick < n) (void)fill(w, &is->fields[f].value, pick, block + is->fields[f].offset);
        pick -= n;
    }
    for (unsigned i = 0; w->more && i < FIELDS; i++) {
        const api_field *field = &is->fields[draw(&w->more) % is->count];
        const int n = values_of(&field->value);
        (void)fill(w, &field->value, (int)(draw(&w->more) % (unsigned)n), block + field->offset);
    }
    return block;
}

/* -- calls ------------------------------------------------------------------ */

static const char *only; /* the function that is called alone; NULL: all */

/* A world in which the function has what it is about. */
static int variant_of(const api_call *call, int number) {
    for (int i = 0; i < call->count; i++) {
        if (call->argument[i].kind == OPTIM || call->argument[i].kind == EMA ||
            call->argument[i].kind == OUTER)
            return 1;
        if (call->argument[i].kind == CACHE) return 2;
        if (call->argument[i].kind == PIPELINE) return 3;
    }
    return number % 4;
}

/* An error has a sentence. */
static void expect_sentence(const api_call *call, const tsh_ctx *ctx) {
    const tsh_error *error = tsh_last_error(ctx);
    if (error->code != TSH_OK && (!*error->message || strstr(error->message, "(null)")) &&
        strcmp(call->name, "tsh_fail") != 0)
        fail_msg("%s: the error is \"%s\"", call->name, error->message);
}

/* The program goes on: a step, as far as the ctx's error and what is left of the model let it. */
static void go_on(const world *w) {
    tsh_module *up;
    if (!w->ctx) return; /* closed */
    tsh_clear_error(w->ctx);
    up = tsh_find(tsh_root(w->ctx), "up");
    (void)tsh_backward(w->ctx, tsh_mean(tsh_forward(up, w->tensor[0]), TSH_ALL, 0));
    (void)tsh_optim_step(w->optim);
    tsh_zero_grads(tsh_root(w->ctx));
}

static void call_once(const api_call *call, const int *pick, int variant, uint64_t more) {
    world w;
    void *slot[ARGUMENTS];
    begin(&w, variant);
    w.more = more;
    if (only) fprintf(stderr, "%s variant %d:", call->name, variant);
    for (int i = 0; i < call->count; i++) {
        slot[i] = block_of(&w, NULL, sizeof(tsh_layout));
        (void)fill(&w, &call->argument[i], pick[i], slot[i]);
        if (only) fprintf(stderr, " %s %d", call->argument[i].name, pick[i]);
    }
    if (only) fprintf(stderr, "\n");
    call->call(slot);
    if (strcmp(call->name, "tsh_close") == 0) {
        if (pick[0] == 0) w.ctx = NULL;
        if (pick[0] == 1) w.other = NULL;
    }
    expect_sentence(call, w.ctx);
    expect_sentence(call, w.other);
    go_on(&w);
    end(&w);
}

/* Each value of each argument while the others are usual; then random ones. Returns how many. */
static int call_all(const api_call *call) {
    int pick[ARGUMENTS] = {0}, n = 0;
    uint64_t state = 1;
    call_once(call, pick, variant_of(call, 0), 0);
    for (int i = 0; i < call->count; i++, n++) {
        const int values = values_of(&call->argument[i]);
        for (pick[i] = 1; pick[i] < values; pick[i]++, n++)
            call_once(call, pick, variant_of(call, n), 0);
        pick[i] = 0;
    }
    for (int r = 0; r < RANDOM_CALLS && call->count > 0; r++, n++) {
        for (int i = 0; i < call->count; i++)
            pick[i] = (int)(draw(&state) % (unsigned)values_of(&call->argument[i]));
        call_once(call, pick, variant_of(call, (int)(draw(&state) % 4)), state);
    }
    return n + 1;
}

static int calls_made, next_function;

/* Of the function whose turn it is. */
static void test_function(void **state) {
    const api_call *call = &calls[next_function++];
    (void)state;
    if (!only || strcmp(only, call->name) == 0) calls_made += call_all(call);
}

static void test_texts_without_objects_or_room(void **state) {
    const tsh_layout layout = tsh_sharded(1);
    const tsh_coll coll = tsh_coll_make(TSH_BARRIER, TSH_F32);
    tsh_tensor *t;
    tsh_ctx *ctx = open_ctx();
    char text[64] = "before";
    (void)state;
    t = tsh_ones(ctx, tsh_shape1(2));
    assert_null(tsh_layout_text(layout, NULL, 0));
    assert_null(tsh_layout_text(layout, NULL, sizeof text));
    assert_null(tsh_to_string(t, NULL, 0));
    assert_null(tsh_to_string(t, NULL, sizeof text));
    assert_null(tshb_coll_text(&coll, NULL, 1, NULL, sizeof text));
    assert_null(tshb_group_text(1, NULL, sizeof text));
    assert_string_equal(tsh_layout_text(layout, text, 0), "before");
    assert_string_equal(tsh_layout_text(layout, text, sizeof text), "S(1)");
    assert_string_equal(tsh_to_string(t, text, sizeof text), "f32 (2) R: 1 1");
    assert_string_equal(tshb_coll_text(NULL, NULL, 1, text, sizeof text), "");
    tsh_close(ctx);
}

static void test_extremes_of_chunks_and_schedules(void **state) {
    const tsh_schedule usual = {.kind = TSH_LINEAR, .lr = 1, .warmup = 10, .total = 110};
    const tsh_schedule endless = {
        .kind = TSH_COSINE, .lr = 1, .warmup = INT64_MIN, .total = INT64_MAX};
    tsh_layout layout = tsh_sharded(0);
    (void)state;
    assert_int_equal(tsh_shard_range(layout, INT64_MAX, 2, 0, NULL), -1);
    assert_int_equal(tsh_shard_range(layout, INT64_MAX / 4, INT_MAX, INT_MAX - 1, NULL) >= 0, 1);
    layout.segments = 2;
    layout.segment[0].length = layout.segment[1].length = INT64_MAX; /* their sum would be -2 */
    assert_int_equal(tsh_shard_range(layout, 4, 2, 1, NULL), -1);
    assert_true(tsh_schedule_lr(NULL, 1) == 0);
    assert_true(tsh_schedule_lr(&usual, 0) == 0.1);
    assert_true(tsh_schedule_lr(&usual, INT64_MIN) == 0.1);
    assert_true(tsh_schedule_lr(&usual, 60) == 0.5);
    assert_true(tsh_schedule_lr(&usual, INT64_MAX) == 0);
    assert_true(fabs(tsh_schedule_lr(&endless, 0) - 0.5) < 1e-12);
}

/* tsh_open tells a program of version 0.1 why it is refused, through the comm and the logger of its
 * tsh_desc: these lie where they lay then. (On a machine of 64 bits.) */
static void test_fields_that_version_0_1_had_lie_where_they_lay(void **state) {
    (void)state;
    if (sizeof(void *) != 8) skip();
    assert_int_equal(offsetof(tsh_desc, comm), 0);
    assert_int_equal(sizeof(tsh_comm), 224);
    assert_int_equal(offsetof(tsh_desc, logger), 288);
    assert_int_equal(offsetof(tsh_logger, user), 8);
}

static void test_what_is_missing_is_said(void **state) {
    const char *none = NULL;
    tsh_error error;
    tsh_ctx *ctx = open_ctx();
    tsh_coll coll = tsh_coll_make((tsh_coll_kind)-1, TSH_F32);
    tsh_req req;
    (void)state;
    assert_int_equal(tsh_start(tsh_tp(ctx), &coll, &req), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_fail(ctx, TSH_ERR_SHAPE, none, 1), TSH_ERR_SHAPE);
    assert_string_equal(tsh_last_error(ctx)->message, "shapes do not fit");
    tsh_close(ctx);
    assert_int_equal(tsh_run_on(NULL, NULL, stub_tsh_run_fn, NULL, &error), 1);
    assert_int_equal(error.code, TSH_ERR_ARGUMENT);
    assert_string_equal(error.message, "comm is NULL");
    assert_int_equal(tsh_run(NULL, NULL, NULL), 1);
}

static void test_threads_without_ranks(void **state) {
    static const int ranks[] = {0, -1, INT_MIN, INT_MAX};
    tsh_threads_world *threads = NULL;
    tsh_comm comm;
    (void)state;
    for (int i = 0; i < COUNT_OF(ranks); i++) {
        assert_int_equal(tsh_threads_run(ranks[i], NULL, stub_tsh_run_fn, NULL), 1);
        assert_int_equal(tsh_threads_world_new(ranks[i], &threads), TSH_ERR_ARGUMENT);
        assert_null(threads);
    }
    assert_int_equal(tsh_threads_run(2, NULL, NULL, NULL), 1);
    assert_int_equal(tsh_threads_world_new(1, NULL), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_threads_world_new(1, &threads), TSH_OK);
    for (int i = 0; i < COUNT_OF(ranks); i++)
        assert_int_equal(tsh_threads_comm(threads, ranks[i] ? ranks[i] : 1, &comm),
                         TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_threads_comm(threads, 0, NULL), TSH_ERR_ARGUMENT);
    assert_int_equal(tsh_threads_comm(NULL, 0, &comm), TSH_ERR_ARGUMENT);
    tsh_threads_world_free(threads);
    tsh_threads_world_free(NULL);
}

static void test_counts(void **state) {
    (void)state;
    printf("%d functions, %d calls\n", next_function, calls_made);
    assert_true(only || calls_made >= CALLS_WANTED);
}

static int begin_folder(void **state) {
    return files_begin(state) || chdir(files_here);
}

static int end_folder(void **state) {
    return chdir("/") || files_end(state);
}

int main(void) {
    const struct CMUnitTest each = cmocka_unit_test_teardown(test_function, files_after);
    const struct CMUnitTest others[] = {cmocka_unit_test(test_counts),
                                        cmocka_unit_test(test_texts_without_objects_or_room),
                                        cmocka_unit_test(test_extremes_of_chunks_and_schedules),
                                        cmocka_unit_test(
                                            test_fields_that_version_0_1_had_lie_where_they_lay),
                                        cmocka_unit_test(test_what_is_missing_is_said),
                                        cmocka_unit_test(test_threads_without_ranks)};
    static struct CMUnitTest tests[COUNT_OF(calls) + COUNT_OF(others)];
    only = getenv("API_CALL");
    for (int i = 0; i < COUNT_OF(calls); i++) {
        tests[i] = each;
        tests[i].name = calls[i].name;
    }
    memcpy(&tests[COUNT_OF(calls)], others, sizeof others);
    return cmocka_run_group_tests(tests, begin_folder, end_folder);
}
