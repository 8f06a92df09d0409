/* gpt2.h - GPT-2 (Radford et al. 2019): learned positions, layer norms before attention and MLP,
 * weights stored (in, out). */
#ifndef LLM_GPT2_H
#define LLM_GPT2_H

static void gpt2_config(llm_config *c) {
    llm_read_sizes(c);
    c->hidden = llm_config_count(c, "n_inner", 4 * (double)c->width);
    c->places = llm_config_count(c, "max_position_embeddings|n_positions", 1024);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "layer_norm_epsilon", 1e-5);
    llm_read_activation(c, "activation_function", "gelu_new");
    c->qkv_bias = c->out_bias = c->mlp_bias = 1;
    c->tied = llm_config_flag(c, "tie_word_embeddings", 1);
    llm_config_must(c, "scale_attn_weights", 1, 1);
    llm_config_must(c, "scale_attn_by_inverse_layer_idx", 0, 0);
    llm_config_must(c, "add_cross_attention", 0, 0);
}

static tsh_tensor *gpt2_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0], *y = llm_call(self, "attn", llm_call(self, "ln_1", x));
    (void)n, (void)user;
    y = tsh_forward_residual(tsh_find(self, "ln_2"), &x, y); /* x += y; y = ln_2(x) */
    return tsh_add(x, llm_call(self, "mlp", y));
}

static void gpt2_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {
        .fused = "c_attn", .out = "c_proj", .reversed = 1};
    static const tsh_mlp_desc mlp = {.up = "c_fc", .down = "c_proj", .reversed = 1};
    llm_add_norm(m, self, "ln_1", m->config->width);
    llm_add_attention(m, self, "attn", &attention);
    llm_add_norm(m, self, "ln_2", m->config->width);
    llm_add_mlp(m, self, "mlp", &mlp);
}

static void gpt2_add(llm_net *m) {
    llm_add_embedding(m, m->base, "wte");
    llm_add_places(m, m->base, "wpe", 0);
    llm_add_blocks(m, m->base, "h", gpt2_block, gpt2_add_block);
    llm_add_norm(m, m->base, "ln_f", m->config->width);
    llm_add_head(m, "lm_head", 0, "wte");
}

static tsh_tensor *gpt2_embed(llm_net *m, tsh_tensor *ids) {
    tsh_tensor *x = llm_embed(m, "wte", ids);
    return tsh_add(x, llm_call(m->base, "wpe", llm_places(m, ids, 0)));
}

static tsh_tensor *gpt2_finish(llm_net *m, tsh_tensor *x) {
    return llm_head(m, "lm_head", llm_call(m->base, "ln_f", llm_last(m, x)));
}

static const llm_family gpt2_family = {"gpt2",     "transformer", gpt2_config, gpt2_add,
                                       gpt2_embed, gpt2_finish,   NULL};

#endif
