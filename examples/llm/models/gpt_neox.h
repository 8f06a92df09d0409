/* gpt_neox.h - GPT-NeoX and Pythia (Black et al. 2022): attention and MLP in parallel, each after a
 * layer norm of its own; rotary positions on a part of each head. */
#ifndef LLM_GPT_NEOX_H
#define LLM_GPT_NEOX_H

/* Refuses a config.json that has two different values for one setting: under `own`, the key that
 * gpt_neox reads, and under `key`, that of other families, as some versions of transformers wrote
 * both. otherwise: the default of `own`. */
static void gpt_neox_same(llm_config *c, const char *key, const char *own, double otherwise) {
    const double value = llm_config_number(c, own, otherwise);
    const double again = llm_config_number(c, key, value);
    if (value != again)
        llm_refuse(c, "config.json: %s is %g, %s %g; they must be the same", key, again, own,
                   value);
}

static void gpt_neox_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "intermediate_size", LLM_NEEDED);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_eps", 1e-5);
    llm_read_activation(c, "hidden_act", "gelu");
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 1);
    c->mlp_bias = 1;
    c->tied = llm_config_flag(c, "tie_word_embeddings", 0);
    c->parallel = llm_config_flag(c, "use_parallel_residual", 1);
    c->turns_part = 1;
    llm_read_rope_named(c, "rotary_emb_base", 10000, "rotary_pct", 0.25);
    gpt_neox_same(c, "rope_theta", "rotary_emb_base", 10000);
    gpt_neox_same(c, "partial_rotary_factor", "rotary_pct", 0.25);
}

/* Runs a block. If c->parallel: x += attention(norm(x)) + mlp(norm'(x)); otherwise:
 * x += attention(norm(x)); x += mlp(norm'(x)). */
static tsh_tensor *gpt_neox_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_config *c = ((const llm_net *)user)->config;
    tsh_tensor *x = in[0], *y = llm_call(self, "attention", llm_call(self, "input_layernorm", x));
    tsh_tensor *sum = tsh_add(x, y), *read = c->parallel ? x : sum;
    (void)n;
    return tsh_add(sum, llm_call(self, "mlp", llm_call(self, "post_attention_layernorm", read)));
}

static void gpt_neox_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {
        .fused = "query_key_value", .by_group = 1, .out = "dense"};
    static const tsh_mlp_desc mlp = {.up = "dense_h_to_4h", .down = "dense_4h_to_h"};
    llm_add_norm(m, self, "input_layernorm", m->config->width);
    llm_add_norm(m, self, "post_attention_layernorm", m->config->width);
    llm_add_attention(m, self, "attention", &attention);
    llm_add_mlp(m, self, "mlp", &mlp);
}

static void gpt_neox_add(llm_net *m) {
    llm_add_embedding(m, m->base, "embed_in");
    llm_add_blocks(m, m->base, "layers", gpt_neox_block, gpt_neox_add_block);
    llm_add_norm(m, m->base, "final_layer_norm", m->config->width);
    llm_add_head(m, "embed_out", 0, "embed_in");
}

static tsh_tensor *gpt_neox_embed(llm_net *m, tsh_tensor *ids) {
    return llm_call(m->base, "embed_in", ids);
}

static tsh_tensor *gpt_neox_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "embed_out", llm_call(m->base, "final_layer_norm", llm_last(m, x)));
}

static const llm_family gpt_neox_family = {"gpt_neox",     "gpt_neox",     gpt_neox_config,
                                           gpt_neox_add,   gpt_neox_embed, gpt_neox_finish,
                                           NULL};

#endif
