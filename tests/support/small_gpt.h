/* small_gpt.h - the GPT of examples/gpt.c in small, for tests that train one. */
#ifndef TSHARD_TESTS_SMALL_GPT_H
#define TSHARD_TESTS_SMALL_GPT_H

#include "ranks.h"

enum {
    GPT_LAYERS = 2,
    GPT_HEADS = 4,
    GPT_WIDTH = 16,
    GPT_CONTEXT = 8,
    GPT_BATCH = 2,
    GPT_VOCABULARY = 29
};

static const double gpt_dropout = 0.1;

static tsh_tensor *gpt_call(tsh_module *module, const char *child, tsh_tensor *x) {
    return tsh_forward(tsh_find(module, child), x);
}

static tsh_tensor *gpt_attention(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const tsh_attention_desc desc = {
        .causal = 1, .dropout = tsh_training(self) ? gpt_dropout : 0, .owner = self};
    const tsh_shape heads = tsh_shape4(GPT_BATCH, GPT_CONTEXT, GPT_HEADS, GPT_WIDTH / GPT_HEADS);
    tsh_tensor *qkv[3] = {NULL, NULL, NULL}, *y;
    int i;
    (void)n, (void)user;
    tsh_split(gpt_call(self, "c_attn", in[0]), -1, 3, qkv);
    for (i = 0; i < 3; i++) qkv[i] = tsh_transpose(tsh_reshape(qkv[i], heads), 1, 2);
    y = tsh_transpose(tsh_attention(qkv[0], qkv[1], qkv[2], &desc), 1, 2);
    y = tsh_reshape(y, tsh_shape3(GPT_BATCH, GPT_CONTEXT, GPT_WIDTH));
    return gpt_call(self, "dropout", gpt_call(self, "c_proj", y));
}

static tsh_tensor *gpt_mlp(tsh_module *self, tsh_tensor **in, int n, void *user) {
    (void)n, (void)user;
    return gpt_call(self, "c_proj", tsh_gelu_tanh(gpt_call(self, "c_fc", in[0])));
}

static tsh_tensor *gpt_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = tsh_add(in[0], gpt_call(self, "attn", gpt_call(self, "ln_1", in[0])));
    (void)n, (void)user;
    return tsh_add(x, gpt_call(self, "mlp", gpt_call(self, "ln_2", x)));
}

static void gpt_add_block(tsh_module *h, int index) {
    const tsh_layer_norm_desc norm = {.dim = GPT_WIDTH};
    const tsh_linear_desc c_attn = {.in = GPT_WIDTH, .out = 3 * GPT_WIDTH};
    const tsh_linear_desc c_fc = {.in = GPT_WIDTH, .out = 4 * GPT_WIDTH};
    const tsh_linear_desc attn_proj = {.in = GPT_WIDTH, .out = GPT_WIDTH};
    const tsh_linear_desc mlp_proj = {.in = 4 * GPT_WIDTH, .out = GPT_WIDTH};
    const tsh_module_desc as_block = {gpt_block, NULL}, as_attention = {gpt_attention, NULL},
                          as_mlp = {gpt_mlp, NULL};
    tsh_module *self, *part;
    char name[16];
    (void)snprintf(name, sizeof name, "%d", index);
    self = tsh_add_module(h, name, &as_block);
    tsh_add_layer_norm(self, "ln_1", &norm);
    part = tsh_add_module(self, "attn", &as_attention);
    tsh_add_linear(part, "c_attn", &c_attn);
    tsh_add_linear(part, "c_proj", &attn_proj);
    tsh_add_dropout(part, "dropout", gpt_dropout);
    tsh_add_layer_norm(self, "ln_2", &norm);
    part = tsh_add_module(self, "mlp", &as_mlp);
    tsh_add_linear(part, "c_fc", &c_fc);
    tsh_add_linear(part, "c_proj", &mlp_proj);
}

/* How a model differs from that of gpt_add. */
typedef struct gpt_form {
    int layers;
    int own_head; /* not tied to the embedding */
    int sparse;   /* the embedding's gradient */
} gpt_form;

UNUSED static tsh_module *gpt_add_form(tsh_ctx *ctx, const gpt_form *form) {
    const tsh_embedding_desc wte = {
        .count = GPT_VOCABULARY, .dim = GPT_WIDTH, .lookup = {.sparse = form->sparse}};
    const tsh_embedding_desc wpe = {.count = GPT_CONTEXT, .dim = GPT_WIDTH};
    const tsh_linear_desc head = {.in = GPT_WIDTH, .out = GPT_VOCABULARY, .bias = TSH_NO};
    const tsh_layer_norm_desc norm = {.dim = GPT_WIDTH};
    tsh_module *gpt = tsh_root(ctx), *h;
    int i;
    tsh_add_embedding(gpt, "wte", &wte);
    tsh_add_embedding(gpt, "wpe", &wpe);
    tsh_add_dropout(gpt, "drop", gpt_dropout);
    h = tsh_add_module(gpt, "h", NULL);
    for (i = 0; i < form->layers; i++) gpt_add_block(h, i);
    tsh_add_layer_norm(gpt, "ln_f", &norm);
    tsh_add_linear(gpt, "lm_head", &head);
    if (!form->own_head) tsh_tie(tsh_find(gpt, "lm_head"), "weight", tsh_param(gpt, "wte.weight"));
    return gpt;
}

/* Everything under the ctx's root; not sharded yet, no values yet. */
UNUSED static tsh_module *gpt_add(tsh_ctx *ctx) {
    const gpt_form form = {.layers = GPT_LAYERS};
    return gpt_add_form(ctx, &form);
}

enum { GPT_RULES = 6, GPT_SEQUENCE_RULES = 11 };

static const tsh_plan_rule gpt_plan[GPT_RULES] = {
    {.path = "wte", .style = TSH_ROWWISE},
    {.path = "h.*.attn.c_attn", .style = TSH_COLWISE, .segments = 3, .unit = GPT_WIDTH / GPT_HEADS},
    {.path = "h.*.attn.c_proj", .style = TSH_ROWWISE, .unit = GPT_WIDTH / GPT_HEADS},
    {.path = "h.*.mlp.c_fc", .style = TSH_COLWISE},
    {.path = "h.*.mlp.c_proj", .style = TSH_ROWWISE},
    {.path = "lm_head", .style = TSH_COLWISE},
};

/* The same with sequence parallelism: what lies between the pairs is cut along T. */
static const tsh_layout gpt_whole = {TSH_REPLICATED, 0, 0, {{0, 0}}};
static const tsh_layout gpt_places = {TSH_SHARDED, 0, 1, {{0, 1}}}; /* (T, C) */
static const tsh_layout gpt_along = {TSH_SHARDED, 1, 1, {{0, 1}}};  /* (B, T, C) */
static const tsh_plan_rule gpt_sequence_plan[GPT_SEQUENCE_RULES] = {
    {.path = "wte", .style = TSH_ROWWISE, .output = &gpt_along},
    {.path = "wpe", .style = TSH_PLAIN, .output = &gpt_places},
    {.path = "drop", .style = TSH_SEQUENCE},
    {.path = "h.*.ln_?", .style = TSH_SEQUENCE},
    {.path = "h.*.attn.c_attn",
     .style = TSH_COLWISE,
     .segments = 3,
     .unit = GPT_WIDTH / GPT_HEADS,
     .input = &gpt_along,
     .regather = 1},
    {.path = "h.*.attn.c_proj",
     .style = TSH_ROWWISE,
     .unit = GPT_WIDTH / GPT_HEADS,
     .output = &gpt_along},
    {.path = "h.*.attn.dropout", .style = TSH_SEQUENCE},
    {.path = "h.*.mlp.c_fc", .style = TSH_COLWISE, .input = &gpt_along, .regather = 1},
    {.path = "h.*.mlp.c_proj", .style = TSH_ROWWISE, .output = &gpt_along},
    {.path = "ln_f", .style = TSH_SEQUENCE, .output = &gpt_whole},
    {.path = "lm_head", .style = TSH_COLWISE},
};

/* Logits (B, T, V) of ids (B, T). */
UNUSED static tsh_tensor *gpt_logits(tsh_module *gpt, tsh_tensor *ids) {
    tsh_tensor *place = tsh_arange(tsh_ctx_of(ids), TSH_I32, 0, GPT_CONTEXT, 1);
    tsh_tensor *x = tsh_add(gpt_call(gpt, "wte", ids), gpt_call(gpt, "wpe", place));
    x = gpt_call(gpt, "ln_f", gpt_call(gpt, "h", gpt_call(gpt, "drop", x)));
    return gpt_call(gpt, "lm_head", x);
}

/* A batch of (B, T + 1) small numbers with a pattern to learn; the same on every rank. */
UNUSED static void gpt_load(tsh_ctx *ctx, tsh_tensor *ids, tsh_tensor *targets, int step) {
    int32_t *x = (int32_t *)tsh_data(ctx, ids), *y = (int32_t *)tsh_data(ctx, targets);
    int i;
    for (i = 0; x && y && i < GPT_BATCH * GPT_CONTEXT; i++) {
        uint64_t start = ranks_mix(5, (uint64_t)(step * GPT_BATCH + i / GPT_CONTEXT));
        uint64_t at = start % GPT_VOCABULARY + 3 * (uint64_t)(i % GPT_CONTEXT);
        x[i] = (int32_t)(at % GPT_VOCABULARY);
        y[i] = (int32_t)((at + 3) % GPT_VOCABULARY);
    }
}

/* One step of training; its loss, or NaN and an error. */
UNUSED static double gpt_step(tsh_ctx *ctx, tsh_optim *optim, tsh_tensor *ids, tsh_tensor *targets,
                              int step) {
    tsh_module *gpt = tsh_root(ctx);
    tsh_tensor *loss;
    double value;
    gpt_load(ctx, ids, targets, step);
    loss = tsh_cross_entropy(gpt_logits(gpt, ids), targets, NULL);
    (void)tsh_backward(ctx, loss);
    value = tsh_item(ctx, loss);
    (void)tsh_optim_step(optim);
    tsh_zero_grads(gpt);
    (void)tsh_step_end(ctx);
    return value;
}

#endif
