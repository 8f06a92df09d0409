/* Every seed of fuzz_config.c once: all of them are configs. And numbers out of range. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L /* opendir */
#endif
#include "fuzz_config.c"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "../support/seeds.h"

static void config_seed(const char *name, uint8_t *data, size_t size) {
    if (!config_take(data, size)) fail_msg("%s is refused", name);
    assert_int_equal(config_take(data, size / 2), 0);
}

static void every_seed_is_taken(void **state) {
    (void)state;
    assert_true(seeds_each("config", config_seed) >= 37);
    assert_int_equal(config_take(NULL, 0), 0);
}

/* The seed "gpt_neox" with another value of layer_norm_eps. */
static int config_with_epsilon(const char *value) {
    static uint8_t data[4096];
    static char text[8192];
    const char *key = "\"layer_norm_eps\":", *at, *end;
    data[seeds_read("config", "gpt_neox", data, sizeof data - 1)] = 0;
    at = strstr((const char *)data, key);
    assert_non_null(at);
    at += strlen(key);
    end = strchr(at, ',');
    assert_non_null(end);
    (void)snprintf(text, sizeof text, "%.*s%s%s", (int)(at - (const char *)data), data, value, end);
    return config_take((const uint8_t *)text, strlen(text));
}

/* A number where gemma's second name for the activation has a string. */
static void an_activation_is_a_string(void **state) {
    static const char text[] = "{\"model_type\": \"gemma\", \"hidden_act\": 255}";
    (void)state;
    assert_int_equal(config_take((const uint8_t *)text, sizeof text - 1), 0);
}

static void a_negative_epsilon_is_refused(void **state) {
    (void)state;
    assert_int_equal(config_with_epsilon("1e-5"), 1);
    assert_int_equal(config_with_epsilon("0"), 1);
    assert_int_equal(config_with_epsilon("-1e-5"), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_seed_is_taken),
                                       cmocka_unit_test(an_activation_is_a_string),
                                       cmocka_unit_test(a_negative_epsilon_is_refused)};
    return cmocka_run_group_tests_name("fuzz seeds", tests, NULL, NULL);
}
