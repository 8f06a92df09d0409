/* qwen2.h - Qwen 2 and 2.5 (Yang et al. 2024): LLaMA with biases of queries, keys and values. */
#ifndef LLM_QWEN2_H
#define LLM_QWEN2_H

/* Reads the sliding window. There is none unless use_sliding_window is true; then layers from index
 * max_window_layers on have it, or those that layer_types names. */
static void qwen2_read_window(llm_config *c) {
    const int64_t from = llm_config_count(c, "max_window_layers", 28);
    const int slides = llm_config_flag(c, "use_sliding_window", 0);
    llm_read_window(c, 4096, from, 0);
    if (!slides) c->window = 0;
}

static void qwen2_config(llm_config *c) {
    llama_sizes(c, 1e-6, 0);
    llm_read_activation(c, "hidden_act", "silu");
    c->qkv_bias = 1;
    qwen2_read_window(c);
    llm_read_rope(c, 10000, 1);
}

static const llm_family qwen2_family = {"qwen2",     "model",      qwen2_config, llama_add,
                                        llama_embed, llama_finish, NULL};

#endif
