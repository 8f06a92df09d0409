/* olmo2.h - OLMo 2 (Walsh et al. 2024): LLaMA with norms after attention and MLP, not before, one
 * norm over the queries of all heads, and one over their keys. */
#ifndef LLM_OLMO2_H
#define LLM_OLMO2_H

static void olmo2_config(llm_config *c) {
    llama_sizes(c, 1e-5, 0);
    llm_read_activation(c, "hidden_act", "silu");
    c->qk_norm = LLM_NORM_OF_ALL;
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    llm_read_rope(c, 10000, 1);
}

/* Runs a block: x += norm(attention(x)); x += norm'(mlp(x)). */
static tsh_tensor *olmo2_block(tsh_module *self, tsh_tensor **in, int n, void *user) {
    tsh_tensor *x = in[0];
    (void)n, (void)user;
    x = tsh_add(x, llm_call(self, "post_attention_layernorm", llm_call(self, "self_attn", x)));
    return tsh_add(x, llm_call(self, "post_feedforward_layernorm", llm_call(self, "mlp", x)));
}

static void olmo2_add_block(llm_net *m, tsh_module *self) {
    llm_add_attention(m, self, "self_attn", &llama_attention);
    llm_add_norm(m, self, "post_attention_layernorm", m->config->width);
    llm_add_mlp(m, self, "mlp", &llama_mlp);
    llm_add_norm(m, self, "post_feedforward_layernorm", m->config->width);
}

static void olmo2_add(llm_net *m) {
    llama_add_with(m, olmo2_block, olmo2_add_block);
}

static const llm_family olmo2_family = {"olmo2",     "model",      olmo2_config, olmo2_add,
                                        llama_embed, llama_finish, NULL};

#endif
