/* examples/llm/chat.h against apply_chat_template of transformers: conversations recorded by
 * make_chats.py, and which template is recognised. */
#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif
#include "../../examples/llm/chat.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

/* tests/golden/chats.json, found from this file's own place. */
static cJSON *goldens(void) {
    const char *here = __FILE__, *slash = strrchr(here, '/');
    char path[512], *text;
    size_t n;
    FILE *file;
    (void)snprintf(path, sizeof path, "%.*s../golden/chats.json",
                   slash ? (int)(slash - here + 1) : 0, here);
    file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be opened (make_chats.py writes it)", path);
    text = (char *)calloc(1, 1 << 20);
    assert_non_null(text);
    n = fread(text, 1, (1 << 20) - 1, file);
    assert_true(n > 0 && n < (1 << 20) - 1);
    (void)fclose(file);
    cJSON *all = cJSON_Parse(text);
    free(text);
    assert_non_null(all);
    assert_true(cJSON_GetArraySize(cJSON_GetObjectItem(all, "templates")) >= 25);
    return all;
}

static const char *string_of(const cJSON *o, const char *key) {
    return cJSON_GetStringValue(cJSON_GetObjectItem(o, key));
}

/* Opens a golden's style, with the special tokens and the date that all goldens share. */
static void open_golden(chat_format *format, const cJSON *all, const char *name) {
    cJSON *config = cJSON_CreateObject();
    cJSON_AddStringToObject(config, "bos_token", string_of(all, "bos"));
    cJSON_AddStringToObject(cJSON_AddObjectToObject(config, "eos_token"), "content",
                            string_of(all, "eos"));
    char *text = cJSON_PrintUnformatted(config);
    if (!chat_open(format, text, NULL, name)) fail_msg("%s", format->error);
    (void)snprintf(format->today, sizeof format->today, "%s", string_of(all, "today"));
    cJSON_free(text);
    cJSON_Delete(config);
}

static size_t read_messages(const cJSON *of, chat_message *messages, size_t most) {
    const cJSON *item;
    size_t n = 0;
    cJSON_ArrayForEach(item, of) {
        const char *role = cJSON_GetStringValue(cJSON_GetArrayItem(item, 0));
        assert_true(n < most);
        messages[n].role = strcmp(role, "system") == 0 ? CHAT_SYSTEM
                           : strcmp(role, "user") == 0 ? CHAT_USER
                                                       : CHAT_ASSISTANT;
        messages[n++].text = cJSON_GetStringValue(cJSON_GetArrayItem(item, 1));
    }
    return n;
}

static void texts_equal_transformers(void **state) {
    cJSON *all = goldens();
    const cJSON *golden, *one;
    int refused = 0;
    (void)state;
    cJSON_ArrayForEach(golden, cJSON_GetObjectItem(all, "templates")) {
        const char *name = string_of(golden, "name");
        chat_format format;
        int i = 0;
        open_golden(&format, all, name);
        cJSON_ArrayForEach(one, cJSON_GetObjectItem(all, "conversations")) {
            const cJSON *texts = cJSON_GetObjectItem(golden, "texts");
            const char *want = cJSON_GetStringValue(cJSON_GetArrayItem(texts, i++));
            chat_message messages[16];
            char *text = chat_render(&format, messages, read_messages(one, messages, 16));
            if (want) {
                if (!text) fail_msg("%s", format.error);
                if (strcmp(text, want) != 0) fail_msg("%s: \n%s\nnot\n%s", name, text, want);
            } else {
                assert_null(text);
                assert_non_null(strstr(format.error, "takes no system message"));
                assert_non_null(strstr(format.error, name));
                refused++;
            }
            free(text);
        }
        chat_close(&format);
    }
    assert_true(refused > 0 && refused % 8 == 0);
    cJSON_Delete(all);
}

/* Each template by the hash of its text, and each hash once. */
static void templates_are_known_by_their_text(void **state) {
    cJSON *all = goldens();
    const size_t count = sizeof chat_styles / sizeof *chat_styles;
    const cJSON *golden;
    size_t known = 0, hashes = 0;
    (void)state;
    for (size_t i = 0; i < count; i++)
        for (int k = 0; k < 2; k++) hashes += chat_styles[i].texts[k] != 0;
    assert_int_equal(hashes, cJSON_GetArraySize(cJSON_GetObjectItem(all, "templates")));
    cJSON_ArrayForEach(golden, cJSON_GetObjectItem(all, "templates")) {
        const uint64_t hash = strtoull(string_of(golden, "hash"), NULL, 16);
        for (size_t i = 0; i < count; i++) {
            const chat_style *s = &chat_styles[i];
            if (s->texts[0] != hash && s->texts[1] != hash) continue;
            assert_string_equal(s->name, string_of(golden, "name"));
            known++;
        }
    }
    assert_int_equal(known, hashes);
    cJSON_Delete(all);
}

/* ChatML's usual template, as a folder of the hub has it. */
#define BODY(newline)                                                                              \
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '" newline                  \
    "' + message['content'] + '<|im_end|>' + '" newline                                            \
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant" newline               \
    "' }}{% endif %}"

static void expect_style(const char *config, const char *jinja, const char *name,
                         const char *style) {
    chat_format format;
    if (!chat_open(&format, config, jinja, name)) fail_msg("%s", format.error);
    assert_string_equal(format.style->name, style);
    chat_close(&format);
}

static void expect_error(const char *config, const char *jinja, const char *name,
                         const char *words) {
    chat_format format;
    assert_false(chat_open(&format, config, jinja, name));
    if (!strstr(format.error, words)) fail_msg("\"%s\" has no \"%s\"", format.error, words);
    assert_non_null(strstr(format.error, "none, chatml, "));
    assert_non_null(strstr(format.error, "granite3"));
    chat_close(&format);
}

static void the_template_of_a_folder_is_found(void **state) {
    static const char *const config = "{\"chat_template\":\"" BODY("\\n") "\"}";
    (void)state;
    expect_style(config, NULL, NULL, "chatml");
    expect_style("{\"chat_template\":\"" BODY("\\\\n") "\"}", NULL, NULL, "chatml");
    expect_style(NULL, BODY("\n") "\n", NULL, "chatml");
    expect_style("{\"chat_template\":\"another\"}", BODY("\n"), NULL, "chatml");
    expect_style("{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"x\"},{\"name\":"
                 "\"default\",\"template\":\"" BODY("\\n") "\"}]}",
                 NULL, NULL, "chatml");
    expect_style(config, NULL, "none", "none");
    expect_style(NULL, NULL, "gemma3", "gemma3");
    expect_error("{\"chat_template\":\"" BODY("\\n") " \"}", NULL, NULL, "--template none");
    expect_error("{\"chat_template\":\"\"}", NULL, NULL, "is not known here");
    expect_error("{\"eos_token\":3}", NULL, NULL, "has no chat template");
    expect_error("no JSON", NULL, NULL, "has no chat template");
    expect_error(config, NULL, "chatm", "--template chatm is none of none, ");
}

static void answers_end_with_a_token(void **state) {
    static const char *const want[][2] = {{"none", ""},
                                          {"chatml", "<|im_end|>"},
                                          {"llama3.2", "<|eot_id|>"},
                                          {"gemma", "<end_of_turn>"},
                                          {"mistral-v0.1", "</s>"}};
    (void)state;
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        chat_format format;
        assert_true(chat_open(&format, "{\"eos_token\":\"</s>\"}", NULL, want[i][0]));
        char *end = chat_end(&format);
        assert_string_equal(end, want[i][1]);
        free(end);
        chat_close(&format);
    }
}

/* Style "none" gives the texts of the messages alone; llama3.2 writes the date of today. */
static void plain_text_and_dates(void **state) {
    const chat_message said[] = {{CHAT_SYSTEM, "S\n"}, {CHAT_USER, "Once upon"},
                                 {CHAT_ASSISTANT, " a time."}, {CHAT_USER, " Then"}};
    chat_format format;
    char today[32], *text;
    const time_t now = time(NULL);
    (void)state;
    assert_true(chat_open(&format, NULL, NULL, "none"));
    text = chat_render(&format, said, 4);
    assert_string_equal(text, "S\nOnce upon a time. Then");
    free(text);
    chat_close(&format);
    assert_true(chat_open(&format, NULL, NULL, "llama3.2"));
    strftime(today, sizeof today, "Today Date: %d %b %Y\n", localtime(&now));
    text = chat_render(&format, said, 2);
    assert_non_null(strstr(text, today));
    free(text);
    chat_close(&format);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(texts_equal_transformers),
                                       cmocka_unit_test(templates_are_known_by_their_text),
                                       cmocka_unit_test(the_template_of_a_folder_is_found),
                                       cmocka_unit_test(answers_end_with_a_token),
                                       cmocka_unit_test(plain_text_and_dates)};
    return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
