/* qwen3.h - Qwen 3 (Yang et al. 2025): LLaMA with an RMS norm of each head's query and key. */
#ifndef LLM_QWEN3_H
#define LLM_QWEN3_H

static void qwen3_config(llm_config *c) {
    llama_sizes(c, 1e-6, 0);
    c->head_size = llm_config_count(c, "head_dim", 128);
    llm_read_activation(c, "hidden_act", "silu");
    c->qkv_bias = c->out_bias = llm_config_flag(c, "attention_bias", 0);
    qwen2_read_window(c);
    llm_read_rope(c, 10000, 1);
}

static void qwen3_add_block(llm_net *m, tsh_module *self, int64_t index) {
    llm_attention_desc attention = llama_attention;
    (void)index;
    attention.head_norm = 1;
    llama_add_layer(m, self, &attention, &llama_mlp);
}

static void qwen3_add(llm_net *m) {
    llama_add_with(m, llama_block, qwen3_add_block);
}

static const llm_family qwen3_family = {"qwen3", "model", qwen3_config, qwen3_add, llama_forward};

#endif
