/* starcoder2.h - StarCoder 2 (Lozhkov et al. 2024): LLaMA's tree and forward with layer norms,
 * biases, and an MLP without a gate. README.md tells how it was added. */
#ifndef LLM_STARCODER2_H
#define LLM_STARCODER2_H

static void starcoder2_config(llm_config *c) {
    llm_read_sizes(c);
    c->kv_heads = llm_config_count(c, "num_key_value_heads", 2);
    c->hidden = llm_config_count(c, "intermediate_size", LLM_NEEDED);
    c->norm = LLM_LAYER;
    c->eps = llm_config_number(c, "norm_epsilon", 1e-5);
    c->tied = llm_config_flag(c, "tie_word_embeddings", 1);
    c->qkv_bias = c->out_bias = c->mlp_bias = llm_config_flag(c, "use_bias", 1);
    llm_read_activation(c, "hidden_act", "gelu_pytorch_tanh");
    /* Marks keys as read that files of this family have and nothing uses. */
    (void)llm_config_key(c, "activation_function|layer_norm_epsilon|mlp_type|norm_type");
    llm_read_window(c, 0, 0, 0);
    llm_read_rope(c, 10000, 1);
}

static void starcoder2_add_block(llm_net *m, tsh_module *self) {
    static const tsh_mlp_desc mlp = {.up = "c_fc", .down = "c_proj"};
    llama_add_layer(m, self, &llama_attention, &mlp);
}

static void starcoder2_add(llm_net *m) {
    llama_add_with(m, llama_block, starcoder2_add_block);
}

static const llm_family starcoder2_family = {
    "starcoder2", "model", starcoder2_config, starcoder2_add, llama_embed, llama_finish, NULL};

#endif
