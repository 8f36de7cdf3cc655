#include "src/server/api.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <tuple>

#include "src/server/fields.h"
#include "src/server/server.h"
#include "src/server/stream.h"

// Bodies to requests, and requests to answers, without a socket.

namespace vivace::server {
namespace {

using Json = nlohmann::json;

constexpr int64_t kVocab = 1000;
const ApiLimits kLimits{.model = "m", .vocab = kVocab};

std::variant<ApiRequest, ApiError> parsed(ApiKind kind, const std::string& body) {
  return parse_request(kind, body, kLimits);
}

ApiRequest accepted(ApiKind kind, const std::string& body) {
  auto result = parsed(kind, body);
  if (const auto* error = std::get_if<ApiError>(&result)) {
    ADD_FAILURE() << body << ": " << error->message;
    return {};
  }
  return std::get<ApiRequest>(std::move(result));
}

ApiError refused(ApiKind kind, const std::string& body) {
  auto result = parsed(kind, body);
  if (const auto* error = std::get_if<ApiError>(&result)) return *error;
  ADD_FAILURE() << body << " was accepted";
  return {};
}

/// The fields in front, and what makes a completions request of them.
std::string completion(const std::string& fields) {
  return R"({"prompt":"a",)" + fields + "}";
}
std::string chat(const std::string& fields) {
  return R"({"messages":[{"role":"user","content":"a"}],)" + fields + "}";
}
std::string generate(const std::string& fields) {
  return R"({"text":"a","sampling_params":{)" + fields + "}}";
}

TEST(Api, IdsThatCannotFitAreRefusedByTheirCount) {
  // The last id is none: a list that is looked at is refused for it.
  const auto parse = [](ApiKind kind, const std::string& body) {
    return parse_request(kind, body, {.model = "m", .vocab = kVocab, .max_model_len = 4});
  };
  for (const auto& [kind, body, param, name] :
       std::vector<std::tuple<ApiKind, std::string, std::string, std::string>>{
           {ApiKind::completions, R"({"prompt":[1,2,3,-1]})", "prompt", "prompt"},
           {ApiKind::completions, R"({"prompt":[[1],[1,2,3,-1]]})", "prompt", "prompt[1]"},
           {ApiKind::generate, R"({"input_ids":[1,2,3,-1]})", "input_ids", "input_ids"}}) {
    SCOPED_TRACE(body);
    const auto result = parse(kind, body);
    ASSERT_TRUE(std::holds_alternative<ApiError>(result));
    const auto& error = std::get<ApiError>(result);
    EXPECT_EQ(error.code, "context_length_exceeded");
    EXPECT_EQ(error.param, param);
    EXPECT_TRUE(error.message.starts_with(name + " has 4 tokens, which leaves no room")) << error.message;
  }
  EXPECT_TRUE(std::holds_alternative<ApiRequest>(parse(ApiKind::completions, R"({"prompt":[1,2,3]})")));
}

TEST(Api, LongListsAreRefusedWhereTheyBecomeTooLong) {
  // What comes after the element that is one too many is not even JSON: nobody reads it.
  const auto list = [](int64_t elements) {
    std::string text = "[0";
    for (int64_t i = 1; i < elements; ++i) text += ",0";
    return text;
  };
  const auto refused = [](ApiKind kind, const std::string& body) {
    const auto result = parse_request(kind, body, {.model = "m", .vocab = kVocab, .max_model_len = 5000});
    EXPECT_TRUE(std::holds_alternative<ApiError>(result));
    return std::holds_alternative<ApiError>(result) ? std::get<ApiError>(result) : ApiError{};
  };
  for (const auto& [kind, body, param, name, code] :
       std::vector<std::tuple<ApiKind, std::string, std::string, std::string, std::string>>{
           {ApiKind::completions, "{\"prompt\":" + list(5001), "prompt", "prompt", "context_length_exceeded"},
           {ApiKind::completions, "{\"prompt\":[[1]," + list(5001), "prompt", "prompt[1]",
            "context_length_exceeded"},
           {ApiKind::generate, "{\"input_ids\":" + list(5001), "input_ids", "input_ids",
            "context_length_exceeded"},
           {ApiKind::chat, "{\"messages\":" + list(5001), "messages", "messages", "invalid_value"},
           {ApiKind::chat, "{\"x\":{\"y\":[1,2,{\"z\":" + list(5001), "x", "x.y[2].z", "invalid_value"}}) {
    const ApiError error = refused(kind, body);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.code, code);
    EXPECT_EQ(error.param, param);
    EXPECT_EQ(error.message, name + (code == "invalid_value"
                                         ? " has more than 5000 elements, which is the limit of a list"
                                         : " has more than 5000 elements: the context holds 5000 tokens, "
                                           "prompt and answer together"));
  }
  std::string many = "{\"x0\":0";
  for (int i = 1; i <= 5000; ++i) many += fmt::format(",\"x{}\":0", i);
  EXPECT_EQ(refused(ApiKind::chat, many).message,
            "the body has more than 5000 elements, which is the limit of an object");
  // What is no list of ids has nothing to do with the context.
  for (const auto& [first, more] : std::vector<std::pair<std::string, std::string>>{
           {"[\"a\"", ",\"a\""}, {"[[1]", ",[1]"}, {"{\"k\":[{}", ",{}"}}) {
    std::string body = "{\"prompt\":" + first;
    for (int i = 0; i < 5000; ++i) body += more;
    const ApiError error = refused(ApiKind::completions, body);
    EXPECT_EQ(error.code, "invalid_value") << first;
    EXPECT_EQ(error.param, "prompt");
  }
  // Of a place far inside the end is named.
  std::string deep = "{\"x\":";
  for (int i = 0; i < 40; ++i) deep += "{\" has [.\":";
  const ApiError error = refused(ApiKind::chat, deep + list(5001));
  EXPECT_EQ(error.param, "x");
  EXPECT_LT(error.message.size(), 300u);
  EXPECT_TRUE(error.message.starts_with("...")) << error.message;
  // One fewer is read to its end.
  EXPECT_EQ(refused(ApiKind::completions, "{\"prompt\":" + list(5000)).code, "invalid_json");
  EXPECT_TRUE(refused(ApiKind::completions, "{\"prompt\":" + list(5000) + "]}")
                  .message.starts_with("prompt has 5000 tokens"));
}

TEST(Api, DefaultsAreThoseOfTheApi) {
  const ApiRequest c = accepted(ApiKind::completions, R"({"prompt":"a"})");
  EXPECT_EQ(c.request.max_tokens, std::nullopt);
  EXPECT_EQ(c.request.sampling.temperature, 1);
  EXPECT_EQ(c.request.sampling.top_p, 1);
  EXPECT_EQ(c.request.sampling.logprobs, -1);
  EXPECT_EQ(c.request.sampling.seed, std::nullopt);
  EXPECT_EQ(c.n, 1);
  EXPECT_FALSE(c.stream || c.echo || c.request.ignore_eos || c.logprobs);
  EXPECT_EQ(accepted(ApiKind::generate, R"({"text":"a"})").request.max_tokens, 128);
}

TEST(Api, NullIsAbsentAndUnknownFieldsAreIgnored) {
  const Json known =
      Json::parse(R"({"model":null,"max_tokens":null,"temperature":null,"top_p":null,"top_k":null,
      "min_p":null,"repetition_penalty":null,"presence_penalty":null,"frequency_penalty":null,"seed":null,"stop":null,
      "stop_token_ids":null,"min_tokens":null,"ignore_eos":null,"n":null,"best_of":null,"echo":null,"logit_bias":null,
      "add_special_tokens":null,"skip_special_tokens":null,"stream":null,"stream_options":null,"logprobs":null,
      "suffix":null,"tools":null,"response_format":null,"user":"u","something_new":{"a":[1,2]}})");
  Json body = known;
  body["prompt"] = "a";
  accepted(ApiKind::completions, body.dump());
  body = known;
  body["messages"] = {{{"role", "user"}, {"content", "a"}}};
  accepted(ApiKind::chat, body.dump());
}

TEST(Api, EveryFieldArrives) {
  const ApiRequest c = accepted(
      ApiKind::completions,
      R"({"model":"m","prompt":[1,2,3],"max_tokens":7,"temperature":0.5,"top_k":5,"top_p":0.25,"min_p":0.125,
          "repetition_penalty":1.5,"presence_penalty":-1,"frequency_penalty":2,"seed":-1,"stop":["x","y"],
          "stop_token_ids":[4],"min_tokens":2,"ignore_eos":true,"n":3,"best_of":3,"logprobs":2,
          "logit_bias":{"17":-2.5},"skip_special_tokens":false,"add_special_tokens":false,"cache_salt":"s",
          "stream":true,"stream_options":{"include_usage":true}})");
  EXPECT_EQ(std::get<std::vector<int32_t>>(c.prompts.at(0)), (std::vector<int32_t>{1, 2, 3}));
  const Request& r = c.request;
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.min_tokens, 2);
  EXPECT_EQ(r.sampling.temperature, 0.5);
  EXPECT_EQ(r.sampling.top_k, 5);
  EXPECT_EQ(r.sampling.top_p, 0.25);
  EXPECT_EQ(r.sampling.min_p, 0.125);
  EXPECT_EQ(r.sampling.repetition_penalty, 1.5);
  EXPECT_EQ(r.sampling.presence_penalty, -1);
  EXPECT_EQ(r.sampling.frequency_penalty, 2);
  EXPECT_EQ(r.sampling.seed, ~uint64_t{0});
  EXPECT_EQ(r.sampling.logprobs, 2);
  EXPECT_EQ(r.sampling.logit_bias, (std::vector<std::pair<int32_t, float>>{{17, -2.5f}}));
  EXPECT_EQ(r.stop, (std::vector<std::string>{"x", "y"}));
  EXPECT_EQ(r.stop_ids, std::vector<int32_t>{4});
  EXPECT_TRUE(r.ignore_eos && !r.skip_special && c.stream && c.include_usage && !c.add_special_tokens);
  EXPECT_EQ(r.cache_salt, "s");
  EXPECT_EQ(c.n, 3);

  const ApiRequest s = accepted(
      ApiKind::generate,
      R"({"input_ids":[[1],[2,3]],"stream":true,"return_logprob":true,"top_logprobs_num":2,"logprob_start_len":-1,
          "sampling_params":{"max_new_tokens":9,"min_new_tokens":1,"sampling_seed":5,"top_k":-1,"ignore_eos":true}})");
  EXPECT_EQ(s.prompts.size(), 2u);
  EXPECT_EQ(s.request.max_tokens, 9);
  EXPECT_EQ(s.request.min_tokens, 1);
  EXPECT_EQ(s.request.sampling.seed, 5);
  EXPECT_EQ(s.request.sampling.top_k, 0);
  EXPECT_EQ(s.request.sampling.logprobs, 2);
  EXPECT_TRUE(s.stream && s.list && s.request.ignore_eos && s.logprobs);

  const ApiRequest h =
      accepted(ApiKind::chat, chat(R"("max_completion_tokens":5,"logprobs":true,"top_logprobs":3,
          "chat_template_kwargs":{"enable_thinking":false})"));
  EXPECT_EQ(h.request.max_tokens, 5);
  EXPECT_EQ(h.request.sampling.logprobs, 3);
  EXPECT_EQ(h.template_variables, nlohmann::ordered_json({{"enable_thinking", false}}));
}

TEST(Api, ContentOfMessagesIsTextOrAListOfTextParts) {
  const ApiRequest r = accepted(ApiKind::chat, R"({"messages":[
      {"role":"system","content":"s"},
      {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"name":"n"},
      {"role":"tool","content":"t","tool_call_id":"id"},
      {"role":"assistant","content":"x","tool_calls":null}]})");
  EXPECT_EQ(r.messages[1]["content"], "a\nb");
  EXPECT_EQ(r.messages[1]["name"], "n");
  EXPECT_EQ(r.messages[2]["tool_call_id"], "id");
}

// https://github.com/sgl-project/sglang/issues/40076: one request's wild number ended the scheduler.
TEST(Api, H29NumbersBesideTheirRangeAreRefusedByName) {
  struct Bad {
    ApiKind kind;
    std::string body, param;
  };
  std::vector<Bad> bads;
  for (const char* value : {"21", "1000", "1001", "-1", "2147483648", "1e9", "2.5", "\"5\"", "true"}) {
    bads.push_back({ApiKind::completions, completion(R"("logprobs":)" + std::string(value)), "logprobs"});
    bads.push_back(
        {ApiKind::chat, chat(R"("logprobs":true,"top_logprobs":)" + std::string(value)), "top_logprobs"});
  }
  const std::vector<std::pair<std::string, std::vector<std::string>>> fields = {
      {"n", {"0", "-1", "129", "1.5", "\"1\"", "true"}},
      {"best_of", {"0", "2", "129"}},
      {"top_k", {"-2", "1.5", "9223372036854775808", "\"1\""}},
      {"top_p", {"0", "-0.1", "1.1", "true"}},
      {"min_p", {"-0.1", "1.1", "\"0\""}},
      {"seed", {"9223372036854775808", "-9223372036854775809", "0.5", "\"1\"", "[]"}},
      {"temperature", {"-1", "1e39", "\"1\"", "true", "{}"}},
      {"repetition_penalty", {"0", "-1", "1e39"}},
      {"presence_penalty", {"-2.1", "2.1"}},
      {"frequency_penalty", {"-2.1", "2.1"}},
      {"max_tokens", {"-1", "\"7\"", "1.5", "true", "9223372036854775808"}},
      {"min_tokens", {"-1", "\"7\""}},
      {"stream", {"1", "\"true\""}},
      {"ignore_eos", {"1"}},
      {"stop_token_ids", {"1", "{}"}},
      {"stop", {"1", "\"\"", "{}"}},
      {"logit_bias", {"[]", "1", "{\"x\":1}", "{\"-1\":1}", "{\"1000\":1}", "{\"1 \":1}"}},
      {"stream_options", {"1", "{\"include_usage\":true}"}},
      {"model", {"1", "\"other\""}},
      {"cache_salt", {"1"}},
  };
  for (const auto& [field, values] : fields)
    for (const std::string& value : values)
      for (const ApiKind kind : {ApiKind::completions, ApiKind::chat})
        bads.push_back(
            {kind, (kind == ApiKind::chat ? chat : completion)("\"" + field + "\":" + value), field});
  for (const Bad& bad : bads) {
    SCOPED_TRACE(bad.body);
    const ApiError error = refused(bad.kind, bad.body);
    EXPECT_EQ(error.status, bad.param == "model" && error.code == "model_not_found" ? 404 : 400);
    EXPECT_EQ(error.param, bad.param);
    EXPECT_NE(error.message.find(bad.param), std::string::npos) << error.message;
  }
}

TEST(Api, ElementsAreNamedByTheirPlace) {
  const std::vector<std::tuple<ApiKind, std::string, std::string, std::string>> cases = {
      {ApiKind::completions, R"({"prompt":[1,1000]})", "prompt[1]",
       "prompt[1] is 1000, needs a token id of 0..999"},
      {ApiKind::completions, R"({"prompt":[-1]})", "prompt[0]",
       "prompt[0] is -1, needs a token id of 0..999"},
      {ApiKind::completions, R"({"prompt":[4294967296]})", "prompt[0]", ""},
      {ApiKind::completions, R"({"prompt":[1.5]})", "prompt[0]",
       "prompt[0] is 1.5, needs a token id of 0..999"},
      {ApiKind::completions, R"({"prompt":[[1],[2,-3]]})", "prompt[1][1]", ""},
      {ApiKind::completions, R"({"prompt":["a",1]})", "prompt[1]",
       "prompt[1] is 1, needs a string, as the first has"},
      {ApiKind::completions, R"({"prompt":[]})", "prompt",
       "prompt is an empty list, needs at least one token"},
      {ApiKind::completions, R"({"prompt":[[]]})", "prompt",
       "prompt[0] is an empty list, needs at least one token"},
      {ApiKind::completions, R"({})", "prompt", "prompt is missing, needs a string or token ids"},
      {ApiKind::completions, R"({"prompt":null})", "prompt", ""},
      {ApiKind::completions, R"({"prompt":{"a":1}})", "prompt", ""},
      {ApiKind::completions, completion(R"("stop":["a",7])"), "stop[1]", "stop[1] is 7, needs a string"},
      {ApiKind::completions, completion(R"("stop_token_ids":[1,1000])"), "stop_token_ids[1]", ""},
      {ApiKind::completions, completion(R"("logit_bias":{"3":101})"), "logit_bias.3",
       "logit_bias.3 is 101, needs a number of -100..100"},
      {ApiKind::chat, R"({"messages":[]})", "messages",
       "messages is an empty list, needs at least one message"},
      {ApiKind::chat, R"({"messages":null})", "messages", "messages is missing, needs a list of messages"},
      {ApiKind::chat, R"({"messages":"hi"})", "messages", ""},
      {ApiKind::chat, R"({"messages":["hi"]})", "messages[0]", ""},
      {ApiKind::chat, R"({"messages":[{"role":"user"}]})", "messages[0].content",
       "messages[0].content is missing, needs a string or a list of text parts"},
      {ApiKind::chat, R"({"messages":[{"content":"a"}]})", "messages[0].role", ""},
      {ApiKind::chat, R"({"messages":[{"role":"king","content":"a"}]})", "messages[0].role",
       "messages[0].role is \"king\", needs system, developer, user, assistant, tool"},
      {ApiKind::chat, R"({"messages":[{"role":"user","content":[{"type":"image_url"}]}]})",
       "messages[0].content[0].type", ""},
      {ApiKind::chat, R"({"messages":[{"role":"user","content":[{"type":"text"}]}]})",
       "messages[0].content[0]", ""},
      {ApiKind::chat, R"({"messages":[{"role":"user","content":"a","name":1}]})", "messages[0].name", ""},
      {ApiKind::chat, chat(R"("max_tokens":5,"max_completion_tokens":6)"), "max_tokens",
       "max_tokens is 5 and max_completion_tokens is 6, needs one of them"},
      {ApiKind::chat, chat(R"("top_logprobs":2)"), "top_logprobs",
       "top_logprobs is 2, needs logprobs to be true"},
      {ApiKind::generate, generate(R"("max_new_tokens":-1)"), "sampling_params.max_new_tokens",
       "sampling_params.max_new_tokens is -1, needs a whole number of at least 0"},
      {ApiKind::generate, generate(R"("max_new_tokens":1e30)"), "sampling_params.max_new_tokens",
       "sampling_params.max_new_tokens is 1e+30, needs a whole number of 0..9223372036854775807"},
      {ApiKind::generate, generate(R"("temperature":1e39)"), "sampling_params.temperature",
       "sampling_params.temperature is 1e+39, needs a finite number of at least 0 in fp32"},
      {ApiKind::generate, generate(R"("temperature":-1)"), "sampling_params.temperature", ""},
      {ApiKind::generate, R"({"text":"a","input_ids":[1]})", "input_ids", ""},
      {ApiKind::generate, R"({"text":"a","sampling_params":[{}]})", "sampling_params", ""},
      {ApiKind::completions, R"({"prompt":["a","b","c","d","e","f","g","h","i"],"n":128})", "n",
       "n is 128 for 9 prompts, needs at most 1024 answers in all"},
  };
  for (const auto& [kind, body, param, message] : cases) {
    SCOPED_TRACE(body);
    const ApiError error = refused(kind, body);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.param, param);
    if (!message.empty()) {
      EXPECT_EQ(error.message, message);
    }
  }
}

TEST(Api, WhatCannotBeDoneIsRefusedAndNotIgnored) {
  const std::vector<std::string> for_chat = {R"("tools":[{"type":"function"}])",
                                             R"("tool_choice":"required")",
                                             R"("functions":[{}])",
                                             R"("response_format":{"type":"json_object"})",
                                             R"("response_format":{"type":"json_schema"})",
                                             R"("response_format":7)",
                                             R"("modalities":["audio"])",
                                             R"("audio":{})",
                                             R"("reasoning_effort":"high")",
                                             R"("continue_final_message":true)",
                                             R"("chat_template":"x")",
                                             R"("echo":true)",
                                             R"("guided_json":{})",
                                             R"("best_of":2)",
                                             R"("prompt_logprobs":1)",
                                             R"("logits_processors":["x"])",
                                             R"("include_stop_str_in_output":true)",
                                             R"("truncate_prompt_tokens":5)",
                                             R"("use_beam_search":true)"};
  for (const std::string& field : for_chat) {
    SCOPED_TRACE(field);
    const ApiError error = refused(ApiKind::chat, chat(field));
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.code, "unsupported_parameter");
    EXPECT_TRUE(field.starts_with("\"" + error.param + "\":")) << error.param;
    EXPECT_TRUE(error.message.starts_with(error.param + " is ")) << error.message;
  }
  for (const char* field :
       {R"("suffix":"x")", R"("echo":true,"logprobs":1)", R"("response_format":{"type":"regex"})",
        R"("tools":[{"type":"function"}])", R"("tool_choice":"required")", R"("audio":{})"})
    EXPECT_EQ(refused(ApiKind::completions, completion(field)).code, "unsupported_parameter") << field;
  EXPECT_EQ(
      refused(ApiKind::chat, R"({"messages":[{"role":"assistant","content":"","tool_calls":[{}]}]})").param,
      "messages[0].tool_calls");
  EXPECT_EQ(refused(ApiKind::generate, generate(R"("json_schema":"{}")")).param,
            "sampling_params.json_schema");
  // What asks for nothing is fine.
  accepted(ApiKind::chat,
           chat(R"("tools":[],"tool_choice":"none","response_format":{"type":"text"},"n":1,"best_of":1)"));
}

TEST(Api, BodiesThatAreNoJsonObjects) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  for (const std::string& body :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"), std::string("\xff\xfe"),
        std::string(R"({"prompt":"a","prompt":"b"})"), std::string("{\"prompt\":\"\xe6\x97\"}"), deep,
        R"({"prompt":)" + deep + "}", std::string("1e999"), std::string("{}x"),
        std::string("{\"prompt\":\"a\0\"}", 15), std::string("{\"prompt\":\"a\"}\0{{", 17),
        std::string("\0{}", 3),
        // The parser quotes the text where it ends, here in its own words.
        std::string(R"({"while parsing value)"), std::string(R"({"a":1,"while parsing value)"),
        std::string(R"({"while parsing value - )")}) {
    const ApiError error = refused(ApiKind::completions, body);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.code, "invalid_json") << error.message;
    EXPECT_TRUE(error.message.starts_with("the body")) << error.message;
    EXPECT_LT(error.message.size(), 400u);
    const Json json = Json::parse(error_body(error), nullptr, false);
    EXPECT_FALSE(json.is_discarded());
  }
}

TEST(Api, EmptyBodiesAreToldWhatIsMissing) {
  for (const char* body : {"", " ", "\r\n\t "}) {
    for (const auto& [kind, needs] :
         std::vector<std::pair<ApiKind, std::string>>{{ApiKind::completions, "prompt"},
                                                      {ApiKind::chat, "messages"},
                                                      {ApiKind::generate, "text or input_ids"}}) {
      const ApiError error = refused(kind, body);
      EXPECT_EQ(error.code, "invalid_json");
      EXPECT_EQ(error.message, "the body is empty, needs a JSON object with " + needs);
    }
  }
}

TEST(Api, NumbersThatAreTooLargeAreNamed) {
  const std::string digits = "9" + std::string(400, '0');
  for (const auto& [kind, body, param, value] :
       std::vector<std::tuple<ApiKind, std::string, std::string, std::string>>{
           {ApiKind::completions, completion(R"("temperature":1e400)"), "temperature", "1e400"},
           {ApiKind::completions, completion(R"("seed":-1e999)"), "seed", "-1e999"},
           {ApiKind::completions, completion(R"("max_tokens":)" + digits), "max_tokens",
            digits.substr(0, 60) + "..."},
           {ApiKind::completions, completion(R"("logit_bias":{"4":1,"5":2e308})"), "logit_bias.5", "2e308"},
           {ApiKind::completions, R"({"prompt":[[1],[2,3,1e400]]})", "prompt[1][2]", "1e400"},
           {ApiKind::chat, R"({"messages":[{"role":"user"},{"role":1e400}]})", "messages[1].role", "1e400"},
           {ApiKind::chat, chat(R"("nobody":{"reads":[1,"a",{"this":1e400}]})"), "nobody.reads[2].this",
            "1e400"},
           {ApiKind::generate, generate(R"("top_p":1e400)"), "sampling_params.top_p", "1e400"}}) {
    const ApiError error = refused(kind, body);
    EXPECT_EQ(error.status, 400);
    EXPECT_EQ(error.code, "invalid_value");
    EXPECT_EQ(error.param, param);
    EXPECT_EQ(error.message,
              param + " is " + value + ", needs a number that float64 holds: at most 1.8e308 in magnitude");
  }
  accepted(ApiKind::completions, completion(R"("temperature":1e-400)"));  // which is 0
}

TEST(Api, FieldsThatAreNoJsonAreNamed) {
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  for (const auto& [body, param, message] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {completion(R"("stop":)" + deep), "stop", "the body: stop is nested deeper than 64 levels"},
           {completion(R"("top_p":NaN)"), "top_p", "the body: top_p is not valid JSON: "},
           {completion(R"("stop":["a",Infinity])"), "stop[1]", "the body: stop[1] is not valid JSON: "},
           {completion("\"suffix\":\"\xff\""), "suffix", "the body: suffix is not valid JSON: "},
           {completion(R"("top_p")"), "", "the body is not valid JSON: "},
           {completion(R"("prompt":"b")"), "prompt", "the body has the key 'prompt' twice"},
           {completion(R"("logit_bias":{"1":2,"1":2})"), "logit_bias",
            "the body: logit_bias has the key '1' twice"}}) {
    const ApiError error = refused(ApiKind::completions, body);
    EXPECT_EQ(error.code, "invalid_json");
    EXPECT_EQ(error.param, param);
    EXPECT_TRUE(error.message.starts_with(message)) << error.message;
  }
}

TEST(Api, ErrorsHaveTheShapeOfOpenAi) {
  const Json body = Json::parse(error_body({.status = 429, .message = "m", .param = "", .code = "c"}));
  EXPECT_EQ(body,
            Json::parse(R"({"error":{"message":"m","type":"rate_limit_error","param":null,"code":"c"}})"));
  const HttpResponse response = error_response({.status = 429, .message = "m", .retry_after_s = 3});
  EXPECT_EQ(response.status, 429);
  EXPECT_EQ(response.headers.at(0), (std::pair<std::string, std::string>("Retry-After", "3")));
}

TEST(Api, RefusalsOfTheEngineHaveTheNamesOfTheApi) {
  const ApiError context =
      error_of(Status(Code::invalid_argument, "request: stop_ids[0] is 5, needs less"), ApiKind::chat);
  EXPECT_EQ(context.message, "stop_token_ids[0] is 5, needs less");
  EXPECT_EQ(context.param, "stop_token_ids");
  EXPECT_EQ(context.status, 400);
  EXPECT_EQ(error_of(Status(Code::resource_exhausted, "engine: full"), ApiKind::chat).status, 429);
  EXPECT_GT(error_of(Status(Code::resource_exhausted, "engine: full"), ApiKind::chat).retry_after_s, 0);
  EXPECT_EQ(error_of(Status(Code::cancelled, "engine: it is shutting down"), ApiKind::chat).status, 503);
  EXPECT_EQ(error_of(Status(Code::device_error, "x"), ApiKind::chat).status, 500);
}

TEST(Api, AnswersToOnePromptHaveSeedsOfTheirOwn) {
  const ApiRequest r = accepted(ApiKind::completions, R"({"prompt":[[1],[2]],"n":2,"seed":10})");
  const std::vector<PromptTokens> prompts = {{.ids = {1}, .text = {}}, {.ids = {2}, .text = {}}};
  std::vector<std::pair<int32_t, uint64_t>> got;
  for (int64_t i = 0; i < r.choices(); ++i) {
    const Request request = engine_request(r, prompts, i, 64);
    got.emplace_back(request.prompt_ids.at(0), request.sampling.seed.value());
    EXPECT_EQ(request.max_tokens, 16);
  }
  EXPECT_EQ(got, (std::vector<std::pair<int32_t, uint64_t>>{{1, 10}, {1, 11}, {2, 10}, {2, 11}}));
  EXPECT_EQ(engine_request(r, prompts, 0, 5).max_tokens, 4) << "what is left of the context";
}

TEST(Api, KeysOfAFile) {
  const auto keys = parse_api_keys("# mine\nabc\r\n\n  \nd-e_f \n");
  ASSERT_TRUE(keys.ok()) << keys.status().message();
  EXPECT_EQ(*keys, (std::vector<std::string>{"abc", "d-e_f"}));
  EXPECT_FALSE(parse_api_keys("# none\n").ok());
  const auto bad = parse_api_keys("abc\na b\n");
  ASSERT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().message().substr(0, 6), "line 2");
}

TEST(Stream, StringsAreEscaped) {
  std::string text;
  for (int c = 0; c < 0x20; ++c) text += static_cast<char>(c);
  text += "\"\\/\x7f日\xf0\x9f\x98\x80";
  std::string out;
  append_json_string(out, text);
  EXPECT_EQ(Json::parse(out), text);
  EXPECT_EQ(out.find('\n'), std::string::npos);
}

TEST(Stream, TokensWithTheSameTextAreOneKeyAndInfinityIsANumber) {
  AnswerWriter writer({.id = "i", .model = "m", .logprobs = true, .bytes_of = [](int32_t) {
                         return std::string_view("\xff");
                       }});
  TokenEvent token;
  token.id = 1;
  token.text = "日";
  token.logprob = -1;
  token.top = {{2, -0.5f}, {1, -1}, {3, -std::numeric_limits<float>::infinity()}};
  const std::string event = writer.event(0, token);
  const Json json = Json::parse(event.substr(6));
  const Json& logprobs = json["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json::array({"\xEF\xBF\xBD"}));
  EXPECT_EQ(logprobs["top_logprobs"][0], Json({{"\xEF\xBF\xBD", -1.0}})) << "the chosen one";
  EXPECT_EQ(logprobs["text_offset"], Json::array({0}));
  const Json next = Json::parse(writer.event(0, token).substr(6));
  EXPECT_EQ(next["choices"][0]["logprobs"]["text_offset"], Json::array({1})) << "characters, not bytes";

  AnswerWriter chat({.kind = ApiKind::chat, .logprobs = true, .bytes_of = [](int32_t) {
                       return std::string_view("\xff");
                     }});
  const Json entry = Json::parse(chat.event(0, token).substr(6))["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(entry["bytes"], Json::array({255}));
  EXPECT_EQ(entry["top_logprobs"][2]["logprob"], -9999.0);
}

}  // namespace
}  // namespace vivace::server
