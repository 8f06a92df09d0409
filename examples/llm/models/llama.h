/* llama.h - LLaMA (Touvron et al. 2023) and its successors, 1 to 3.x: RMS norms before attention
 * and MLP, rotary positions, grouped key heads, a gated MLP. Other families use its functions. */
#ifndef LLM_LLAMA_H
#define LLM_LLAMA_H

/* Reads the sizes, and other keys that nearly all families with RMS norms have. eps, tied: defaults
 * of the norms' eps and of whether the head is tied to the embedding. */
static void llama_sizes(llm_config *c, double eps, int tied) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "intermediate_size", LLM_NEEDED);
    c->eps = llm_config_number(c, "rms_norm_eps", eps);
    c->tied = llm_config_flag(c, "tie_word_embeddings", tied);
    c->norm = LLM_RMS;
}

static void llama_config(llm_config *c) {
    llama_sizes(c, 1e-6, 0);
    llm_read_activation(c, "hidden_act", "silu");
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    c->mlp_bias = llm_config_flag(c, "mlp_bias", 0);
    llm_read_rope(c, 10000, 1);
}

/* Runs a block: x += s attention(norm(x)); x += s mlp(norm'(x)), where s is branch_scale. */
static tsh_tensor *llama_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    const llm_config *c = ((const llm_net *)user)->config;
    tsh_tensor *x = in[0], *y = llm_call(self, "self_attn", llm_call(self, "input_layernorm", x));
    (void)n;
    y = tsh_forward_residual(tsh_find(self, "post_attention_layernorm"), &x,
                             llm_scale(y, c->branch_scale));
    return tsh_add(x, llm_scale(llm_call(self, "mlp", y), c->branch_scale));
}

static const tsh_attention_layer_desc llama_attention = {
    .q = "q_proj", .k = "k_proj", .v = "v_proj", .out = "o_proj"};
static const tsh_mlp_desc llama_mlp = {
    .gated = 1, .gate = "gate_proj", .up = "up_proj", .down = "down_proj"};

static void llama_add_layer(llm_net *m, tsh_module *self, const tsh_attention_layer_desc *attention,
                            const tsh_mlp_desc *mlp) {
    llm_add_norm(m, self, "input_layernorm", m->config->width);
    llm_add_attention(m, self, "self_attn", attention);
    llm_add_norm(m, self, "post_attention_layernorm", m->config->width);
    llm_add_mlp(m, self, "mlp", mlp);
}

static void llama_add_block(llm_net *m, tsh_module *self) {
    llama_add_layer(m, self, &llama_attention, &llama_mlp);
}

/* Adds LLaMA's tree: embedding, blocks, norm and head. block: the forward of a block; add: adds its
 * layers. */
static void llama_add_with(llm_net *m, tsh_forward_fn block,
                           void (*add)(llm_net *m, tsh_module *self)) {
    llm_add_embedding(m, m->base, "embed_tokens");
    llm_add_blocks(m, m->base, "layers", block, add);
    llm_add_norm(m, m->base, "norm", m->config->width);
    llm_add_head(m, "lm_head", 0, "embed_tokens");
}

static void llama_add(llm_net *m) {
    llama_add_with(m, llama_block, llama_add_block);
}

static tsh_tensor *llama_embed(llm_net *m, tsh_tensor *ids) {
    return llm_scale(llm_embed(m, "embed_tokens", ids), m->config->embed_scale);
}

static tsh_tensor *llama_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "norm", llm_last(m, x)));
}

static const llm_family llama_family = {"llama",     "model",      llama_config, llama_add,
                                        llama_embed, llama_finish, NULL};

#endif
