/* phi3.h - Phi-3 and Phi-4 (Abdin et al. 2024): LLaMA with fused linear layers, [Q|K|V] and
 * [gate|up]. */
#ifndef LLM_PHI3_H
#define LLM_PHI3_H

static void phi3_config(llm_config *c) {
    llama_sizes(c, 1e-5, 0);
    llm_read_activation(c, "hidden_act", "silu");
    llm_read_window(c, 0, 0, 0);
    c->turns_part = 1;
    llm_read_rope(c, 10000, 1);
}

static void phi3_add_block(llm_net *m, tsh_module *self) {
    static const tsh_attention_layer_desc attention = {.fused = "qkv_proj"};
    static const tsh_mlp_desc mlp = {.gated = 1, .fused = "gate_up_proj"};
    llama_add_layer(m, self, &attention, &mlp);
}

static void phi3_add(llm_net *m) {
    llama_add_with(m, llama_block, phi3_add_block);
}

static const llm_family phi3_family = {"phi3",      "model",      phi3_config, phi3_add,
                                       llama_embed, llama_finish, NULL};

#endif
