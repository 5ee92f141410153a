// What a plugin does not take is refused with a line in the log that says what to change: fields
// where it is made, tensors where the engine is built.

#include <unistd.h>

#include <cmath>
#include <cstdio>

#include "check.h"
#include "player.h"

namespace {

using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr DataType kT = DataType::kHALF;
constexpr DataType kInt = DataType::kINT32;
constexpr DataType kFloat = DataType::kFLOAT;

// Fields by name, to be spoilt one at a time.
struct Given {
  struct Field {
    std::string name;
    std::vector<int32_t> integers;  // one of the two is empty
    std::vector<float> floats;
    bool is_float = false;
  };
  std::vector<Field> fields;

  void set(const std::string& name, std::vector<int32_t> values) {
    (*this)[name] = {name, std::move(values), {}, false};
  }
  void set_floats(const std::string& name, std::vector<float> values) {
    (*this)[name] = {name, {}, std::move(values), true};
  }
  void remove(const std::string& name) {
    for (size_t i = 0; i < fields.size(); ++i)
      if (fields[i].name == name) fields.erase(fields.begin() + i);
  }
  FieldList list() const {
    FieldList list;
    for (const Field& f : fields)
      if (f.is_float)
        list.add(f.name.c_str(), f.floats.data(), PluginFieldType::kFLOAT32,
                 static_cast<int32_t>(f.floats.size()));
      else
        list.add(f.name.c_str(), f.integers.data(), PluginFieldType::kINT32,
                 static_cast<int32_t>(f.integers.size()));
    return list;
  }

 private:
  Field& operator[](const std::string& name) {
    for (Field& field : fields)
      if (field.name == name) return field;
    return fields.emplace_back();
  }
};

// A node of every op that is right, B = 2, w = 3, Hq = 4, Hkv = 2, D = 64, 5 pages of 8, M = 4.
struct Right {
  std::string op;
  Given fields;
  std::vector<TensorRange> inputs;

  // An axis of an input in the whole profile.
  void set(size_t input, size_t axis, int64_t extent) {
    inputs[input].least[axis] = inputs[input].most[axis] = extent;
  }
};

TensorRange fixed(DataType type, const Extents& extents) { return {type, extents, extents}; }

const TensorRange kCache = fixed(kT, {5, 2, 8, 64}), kPool = fixed(kT, {5, 3, 2, 2, 8, 64}),
                  kPageTable = fixed(kInt, {2, 4}), kLengths = fixed(kInt, {2});

Right kv_append() {
  const TensorRange rows = fixed(kT, {2, 3, 2, 64});
  return {"DustinKvAppend", {}, {rows, rows, kCache, kCache, kPageTable, kLengths}};
}
Right srh_score() {
  Right right{
      "DustinSrhScore",
      {},
      {fixed(kT, {2, 3, 5, 64}), kPageTable, kLengths, fixed(kFloat, {2, 32}), kCache, kCache}};
  right.fields.set("kv_heads", {0, 0, 1, 1, 1});
  right.fields.set("heads_per_cache", {2, 3});
  right.fields.set_floats("scale", {0.125f});
  right.fields.set("accumulate", {1});
  return right;
}
Right select_tokens() {
  Right right{"DustinSelectTokens", {}, {kLengths, fixed(kFloat, {2, 32}), fixed(kFloat, {2, 40})}};
  right.fields.set("budget", {16});
  right.fields.set("lookahead", {4});
  right.fields.set("sink", {2});
  right.fields.set("window", {6});
  return right;
}
Right dense_attention() {
  Right right{
      "DustinDenseAttention", {}, {fixed(kT, {2, 3, 4, 64}), kCache, kCache, kPageTable, kLengths}};
  right.fields.set_floats("scale", {0.125f});
  return right;
}
Right sparse_attention() {
  Right right = dense_attention();
  right.op = "DustinSparseAttention";
  right.inputs.push_back(fixed(kInt, {2, 16}));
  right.inputs.push_back(kLengths);
  right.inputs.push_back(fixed(kInt, {32}));
  return right;
}
// With a pool in the place of caches.
Right pooled(Right right) {
  std::vector<TensorRange> inputs;
  for (const TensorRange& input : right.inputs)
    if (input.least != kCache.least)
      inputs.push_back(input);
    else if (inputs.empty() || inputs.back().least != kPool.least)
      inputs.push_back(kPool);
  right.inputs = inputs;
  if (right.op == "DustinSrhScore")
    right.fields.set("pool_layers", {2, 0});
  else
    right.fields.set("pool_layer", {2});
  return right;
}

using Make = Right (*)();
const std::vector<Make> kAll = {kv_append, srh_score, select_tokens, dense_attention,
                                sparse_attention};

void begin(const Right& right, const std::string& what) {
  Report::get().where = "refusals of " + right.op + ", " + what;
}

// The line must name the op and have the text.
template <class Spoil>
void refuses_fields(const std::string& text, Right right, const Spoil& spoil) {
  begin(right, text);
  spoil(right.fields);
  for (const TensorRTPhase phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
    check(create(right.op, right.fields.list(), phase) == nullptr, "made a plugin");
    Log::get().expect(right.op, text);
  }
}

template <class Spoil>
void refuses_tensors(const std::string& text, Right right, const Spoil& spoil) {
  begin(right, text);
  spoil(right);
  Node node(right.op, right.fields.list(), right.inputs);
  check(!node.build(), "was built");
  Log::get().expect(right.op, text);
}

void test_that_right_ones_are_taken() {
  for (const Make make : kAll)
    for (const bool pool : {false, true}) {
      if (pool && make == select_tokens) continue;
      const Right right = pool ? pooled(make()) : make();
      begin(right, "nothing");
      check(Node(right.op, right.fields.list(), right.inputs).build(), "not built");
      Log::get().expect_nothing();
    }
}

void test_fields() {
  for (const Make make : kAll) {
    refuses_fields("there is no field 'scales'; write one of: ", make(),
                   [](Given& given) { given.set_floats("scales", {1}); });
    for (const Given::Field& field : make().fields.fields) {
      const std::string& name = field.name;
      const std::string quoted = "field '" + name + "' ";
      const bool is_list = name == "kv_heads" || name == "heads_per_cache";
      const std::string wanted = std::string("write ") + (is_list ? "a list of " : "one ") +
                                 (field.is_float ? "float32" : "int32");
      if (name != "accumulate")
        refuses_fields(quoted + "is missing: " + wanted, make(),
                       [&](Given& given) { given.remove(name); });
      refuses_fields(quoted + "has another type: " + wanted, make(), [&](Given& given) {
        field.is_float ? given.set(name, {1}) : given.set_floats(name, {1});
      });
      const auto set_length = [&](Given& given, size_t length) {
        field.is_float ? given.set_floats(name, std::vector<float>(length, 1))
                       : given.set(name, std::vector<int32_t>(length, 1));
      };
      refuses_fields(quoted + "has 0 numbers: " + wanted, make(),
                     [&](Given& given) { set_length(given, 0); });
      if (!is_list)
        refuses_fields(quoted + "has 2 numbers: " + wanted, make(),
                       [&](Given& given) { set_length(given, 2); });
      refuses_fields(quoted + "is there twice: write it once", make(),
                     [&](Given& given) { given.fields.push_back(field); });
      if (field.is_float) continue;
      std::vector<int32_t> negative = field.integers;
      negative.back() = -1;
      refuses_fields(quoted + "has -1: write 0 or more", make(),
                     [&](Given& given) { given.set(name, negative); });
    }
  }
  for (const Make make : {dense_attention, sparse_attention, srh_score})
    for (const float scale : {0.0f, -1.0f, NAN, INFINITY})
      refuses_fields(": write a positive number", make(),
                     [&](Given& given) { given.set_floats("scale", {scale}); });
  for (const Make make : {kv_append, dense_attention, sparse_attention}) {
    refuses_fields("field 'pool_layer' has -1: write 0 or more", make(),
                   [](Given& given) { given.set("pool_layer", {-1}); });
    refuses_fields("field 'pool_layer' has 2 numbers: write one int32", make(),
                   [](Given& given) { given.set("pool_layer", {0, 1}); });
  }
  const auto no_data = [](const char* name) {
    Right right = select_tokens();
    begin(right, "no data");
    right.fields.remove(name);
    FieldList list = right.fields.list();
    list.add(name, nullptr, PluginFieldType::kINT32, 1);
    check(create(right.op, list, TensorRTPhase::kBUILD) == nullptr, "made a plugin");
    Log::get().expect(right.op, "field 'sink' has no data: write one int32");
  };
  no_data("sink");
}

void test_fields_that_do_not_fit() {
  refuses_fields("field 'budget' is 8: write more than sink and window together, 8",
                 select_tokens(), [](Given& given) { given.set("budget", {8}); });
  refuses_fields("write more than sink and window together, 4294967294", select_tokens(),
                 [](Given& given) {
                   given.set("sink", {INT32_MAX});
                   given.set("window", {INT32_MAX});
                 });
  refuses_fields("field 'accumulate' is 2: write 0 or 1", srh_score(),
                 [](Given& given) { given.set("accumulate", {2}); });
  refuses_fields("field 'heads_per_cache' sums to 4 and 'kv_heads' has 5 heads: write as many",
                 srh_score(), [](Given& given) { given.set("heads_per_cache", {1, 3}); });
  for (const int32_t count : {0, 129})
    refuses_fields("field 'heads_per_cache' has " + std::to_string(count) +
                       ": write 1 to 128 query heads a cache",
                   srh_score(), [&](Given& given) { given.set("heads_per_cache", {count, 5}); });
  refuses_fields("field 'pool_layers' has 1 layers and 'heads_per_cache' 2 counts: write as many",
                 pooled(srh_score()), [](Given& given) { given.set("pool_layers", {1}); });
}

void test_number_and_rank_of_inputs() {
  for (const Make make : kAll)
    for (const bool pool : {false, true}) {
      if (pool && make == select_tokens) continue;
      const Right right = pool ? pooled(make()) : make();
      const size_t count = right.inputs.size();
      refuses_tensors("there are " + std::to_string(count + 1) + " inputs, it should be " +
                          std::to_string(count) + ": ",
                      right, [](Right& r) { r.inputs.push_back(kLengths); });
      if (make == select_tokens)
        refuses_tensors("there are 0 inputs, it should be 1: lengths [B]", right,
                        [](Right& r) { r.inputs.clear(); });
      else
        refuses_tensors("there are " + std::to_string(count - 1) + " inputs, it should be " +
                            std::to_string(count) + ": ",
                        right, [](Right& r) { r.inputs.pop_back(); });
      for (size_t i = 0; i < count; ++i)
        refuses_tensors(" dimensions, it should be [", right, [&](Right& r) {
          r.inputs[i].least.push_back(1);
          r.inputs[i].most.push_back(1);
        });
    }
  refuses_tensors("q has 3 dimensions, it should be [B, w, Hq, D]", dense_attention(),
                  [](Right& r) { r.inputs[0] = fixed(kT, {2, 4, 64}); });
}

void test_types() {
  for (const Make make : kAll) {
    const Right right = make();
    for (size_t i = 0; i < right.inputs.size(); ++i) {
      const DataType type = right.inputs[i].type;
      const std::string wanted = type == kInt     ? "INT32"
                                 : type == kFloat ? "FLOAT"
                                                  : "HALF or BF16, the same for all of the node";
      for (const DataType other : {kInt, kFloat, DataType::kINT64, DataType::kBF16, kT}) {
        // The first T is the one that the others are held to.
        if (other == type || (i == 0 && type == kT && other != kInt && other != DataType::kINT64))
          continue;
        refuses_tensors(" should be " + wanted, right, [&](Right& r) { r.inputs[i].type = other; });
      }
    }
  }
  refuses_tensors("v_cache should be HALF or BF16", dense_attention(),
                  [](Right& r) { r.inputs[2].type = DataType::kBF16; });
  // As long as a network is weakly typed all may be FLOAT; then the plugin says what it takes.
  refuses_tensors("q should be HALF or BF16", dense_attention(), [](Right& r) {
    for (const size_t i : {0, 1, 2}) r.inputs[i].type = kFloat;
  });
}

void test_sizes() {
  // Every size of every input beside its neighbours'.
  for (const Make make : kAll)
    for (const bool pool : {false, true}) {
      if (pool && make == select_tokens) continue;
      const Right right = pool ? pooled(make()) : make();
      for (size_t i = 0; i < right.inputs.size(); ++i) {
        if (right.inputs[i].type != kT && right.inputs[i].least.size() == 2) continue;
        if (right.inputs[i].least == Extents{32}) continue;  // read_bound fits anything
        const size_t batch_or_dim = right.inputs[i].least == kPool.least ? 5 : 0;
        if (right.inputs[i].least == kCache.least) continue;
        refuses_tensors(batch_or_dim == 5 ? "D is 64 in " : "B is ", right,
                        [&](Right& r) { r.set(i, batch_or_dim, 7); });
      }
    }
  for (const Make make : {kv_append, dense_attention, sparse_attention}) {
    const size_t cache = make == kv_append ? 2 : 1;
    refuses_tensors("Hkv is 2 in", make(), [&](Right& r) { r.set(cache + 1, 1, 3); });
    refuses_tensors("page_size is 8 in k_cache and 4 in v_cache [pages, Hkv, page_size, D]", make(),
                    [&](Right& r) { r.set(cache + 1, 2, 4); });
    refuses_tensors("pages is 5 in k_cache and 6 in v_cache", make(),
                    [&](Right& r) { r.set(cache + 1, 0, 6); });
    refuses_tensors("D is 64 in", make(), [&](Right& r) { r.set(cache + 1, 3, 128); });
    refuses_tensors("axis 2 of pool is 1, it should be 2: [pages, layers, 2, Hkv, page_size, D]",
                    pooled(make()), [&](Right& r) { r.set(cache, 2, 1); });
    refuses_tensors("field 'pool_layer' has 2, the pool has 2 layers", pooled(make()),
                    [&](Right& r) { r.set(cache, 1, 2); });
  }
  refuses_tensors("w is 3 in k and 4 in v", kv_append(), [](Right& r) { r.set(1, 1, 4); });
  refuses_tensors("Hkv is 4 in k and 2 in k_cache", kv_append(), [](Right& r) {
    r.set(0, 2, 4);
    r.set(1, 2, 4);
  });
  refuses_tensors("B is 2 in q and 3 in indices", sparse_attention(),
                  [](Right& r) { r.set(5, 0, 3); });
  refuses_tensors("axis 2 of queries is 4, it should be 5: [B, R, 5, D]", srh_score(),
                  [](Right& r) { r.set(0, 2, 4); });
  refuses_tensors("B is 2 in queries and 3 in scores_in", srh_score(),
                  [](Right& r) { r.set(3, 0, 3); });
  refuses_tensors("page_size is 8 in key cache 0 and 16 in key cache 1", srh_score(),
                  [](Right& r) { r.set(5, 2, 16); });
  refuses_tensors("field 'pool_layers' has 2, the pool has 2 layers", pooled(srh_score()),
                  [](Right& r) { r.set(4, 1, 2); });
  refuses_tensors("field 'kv_heads' has 1, the caches have 1 KV heads", srh_score(), [](Right& r) {
    r.set(4, 1, 1);
    r.set(5, 1, 1);
  });
  refuses_tensors("B is 2 in lengths and 3 in draft_scores [B, Nd]", select_tokens(),
                  [](Right& r) { r.set(2, 0, 3); });
  refuses_tensors("more than the kernels count", select_tokens(),
                  [](Right& r) { r.set(1, 1, int64_t{1} << 31); });
}

// What the kernels do not take, be it known at once or only by the profile.
void test_limits() {
  for (const Make make : kAll) {
    if (make == select_tokens) continue;
    for (const bool known : {true, false})
      for (const bool pool : {true, false})
        refuses_tensors("D, the head size, is 72; the kernels take 64 80 96 128 256",
                        pool ? pooled(make()) : make(), [&](Right& r) {
                          for (TensorRange& input : r.inputs) {
                            if (input.most.back() == 64)
                              input.most.back() = input.least.back() = 72;
                            input.is_dynamic = !known;
                          }
                        });
  }
  for (const Make make : {dense_attention, sparse_attention})
    for (const bool known : {true, false}) {
      refuses_tensors("Hq, 5 query heads, is no multiple of Hkv, 2 KV heads", make(),
                      [&](Right& r) {
                        r.set(0, 2, 5);
                        r.inputs[0].is_dynamic = !known;
                      });
      refuses_tensors("Hq is 34 and Hkv 2: the kernels take at most 16 query heads a KV head",
                      make(), [&](Right& r) {
                        r.set(0, 2, 34);
                        r.inputs[0].is_dynamic = !known;
                      });
    }
  // What the kernels themselves say at the largest sizes.
  for (const Make make : {dense_attention, sparse_attention, srh_score})
    refuses_tensors("batch 70000 or 2 KV heads exceed 65535", make(), [](Right& r) {
      for (TensorRange& input : r.inputs)
        if (input.least[0] == 2) input.most[0] = 70000;
    });
}

// A context's own mistakes.
void test_running() {
  Right right = dense_attention();
  begin(right, "running");
  for (TensorRange& input : right.inputs)
    if (input.least[0] == 2) input.most[0] = 3;
  const FieldList fields = right.fields.list();
  Node node(right.op, fields, right.inputs);
  check(node.build(), "not built");
  std::vector<Extents> extents;
  for (const TensorRange& input : right.inputs) extents.push_back(input.least);
  std::vector<char> memory(1 << 16, 7), before = memory;
  const std::vector<const void*> inputs(right.inputs.size(), memory.data());
  check(node.change_shapes(extents) == 0, "refused a change of shapes");
  check(node.enqueue(inputs, {memory.data()}) == 0 && memory == before,
        "ran while an engine is built");
  node.deserialize(fields);
  node.attach();
  Log::get().expect_nothing();
  check(node.enqueue(inputs, {memory.data()}) != 0, "ran without shapes");
  Log::get().expect(right.op, "enqueue before onShapeChange");
  extents[3][0] = 3;
  check(node.change_shapes(extents) != 0, "batches that differ");
  Log::get().expect(right.op, "B is 2 in q and 3 in page_table [B, M]");
  extents[3][0] = 2;
  check(node.change_shapes(extents) == 0, "refused a change of shapes");
  check(node.enqueue({nullptr, nullptr, nullptr, nullptr, nullptr}, {nullptr}) != 0, "ran");
  Log::get().expect(right.op, "k cache is null");
  check(memory == before, "wrote");
}

// What CUDA itself refuses.
void test_cuda_errors() {
  for (const int32_t accumulate : {0, 1}) {
    Right right = srh_score();
    begin(right, "CUDA errors");
    right.fields.set("accumulate", {accumulate});
    if (!accumulate) right.inputs.erase(right.inputs.begin() + 3);
    const FieldList fields = right.fields.list();
    Node node(right.op, fields, right.inputs);
    check(node.build(), "not built");
    node.deserialize(fields);
    node.attach();
    std::vector<Extents> extents;
    for (const TensorRange& input : right.inputs) extents.push_back(input.least);
    check(node.change_shapes(extents) == 0, "refused a change of shapes");
    const std::vector<const void*> inputs(right.inputs.size(), nullptr);
    check(node.enqueue(inputs, {nullptr}) != 0, "ran");
    Log::get().expect(right.op, "invalid argument");
  }
}

// What one tensor leaves open another may tell.
void test_what_is_known() {
  Right right = dense_attention();
  begin(right, "what is known");
  right.inputs[0].is_dynamic = right.inputs[1].is_dynamic = true;
  Node node(right.op, right.fields.list(), right.inputs);
  check(node.build(), "not built");
  Log::get().expect_nothing();
  check(node.is_known(0, 0), "the batch is known from the page table");
  check(!node.is_known(0, 1), "nothing tells how many new tokens there are");
  check(!node.is_known(0, 2), "nothing tells how many query heads there are");
  check(node.is_known(0, 3), "the head size is known from the value cache");
  // Nor need bounds fit each other.
  right.inputs[0].most[0] = 9;
  right.inputs[4].most[0] = 7;
  begin(right, "loose bounds");
  check(Node(right.op, right.fields.list(), right.inputs).build(), "not built");
  Log::get().expect_nothing();
}

void test_caches_that_are_copied() {
  for (const bool pool : {false, true}) {
    const Right right = pool ? pooled(kv_append()) : kv_append();
    begin(right, "copies");
    const FieldList fields = right.fields.list();
    Node node(right.op, fields, right.inputs);
    check(node.build(), "not built");
    auto& builds = node.build_side();
    check(builds.getAliasedInput(0) == 2, "which input the cache is written over");
    check(pool ? builds.getNbOutputs() == 1 : builds.getAliasedInput(1) == 3, "the value cache's");
    node.deserialize(fields);
    node.attach();
    std::vector<Extents> extents;
    for (const TensorRange& input : right.inputs) extents.push_back(input.least);
    check(node.change_shapes(extents) == 0, "refused a change of shapes");
    std::vector<char> memory(8, 7);
    const std::vector<const void*> inputs(right.inputs.size(), memory.data());
    std::vector<void*> outputs(pool ? 1 : 2, memory.data());
    outputs.back() = memory.data() + 4;
    check(node.enqueue(inputs, outputs) != 0, "wrote to a copy");
    Log::get().expect(right.op, "set PreviewFeature::kALIASED_PLUGIN_IO_10_03");
  }
}

void test_other_aliases() {
  for (const Make make : {srh_score, select_tokens, dense_attention, sparse_attention}) {
    const Right right = make();
    begin(right, "aliases");
    Node node(right.op, right.fields.list(), right.inputs);
    check(node.build(), "not built");
    for (int32_t i = 0; i < node.build_side().getNbOutputs(); ++i)
      check(node.build_side().getAliasedInput(i) == -1, "written over an input");
    check(node.build_side().getFormatCombinationLimit() == 1, "formats would be timed");
  }
}

void test_creators() {
  Report::get().where = "creators";
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* const all = getCreators(count);
  if (!check(count == 5, "other than five")) return;
  for (const Make make : kAll) {
    const Right right = make();
    begin(right, "creator");
    nvinfer1::IPluginCreatorV3One* const creator = creator_of(right.op);
    if (!check(creator != nullptr, "there is none")) continue;
    check(!std::strcmp(creator->getPluginVersion(), "1") &&
              !std::strcmp(creator->getPluginNamespace(), "dustin"),
          "another version or namespace");
    check(std::count(all, all + count, creator) == 1, "not once");
    const nvinfer1::PluginFieldCollection& names = *creator->getFieldNames();
    for (const Given::Field& field : right.fields.fields)
      check(std::any_of(names.fields, names.fields + names.nbFields,
                        [&](const nvinfer1::PluginField& known) {
                          const bool is_list = field.integers.size() > 1;
                          return known.name == field.name && known.length == (is_list ? 0 : 1) &&
                                 known.type == (field.is_float ? PluginFieldType::kFLOAT32
                                                               : PluginFieldType::kINT32);
                        }),
            "a field that is not announced");
  }
}

// Without a logger, lines go to stderr.
void test_without_a_logger() {
  const Right right = select_tokens();
  begin(right, "without a logger");
  std::FILE* const file = std::tmpfile();
  const int usual = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  setLoggerFinder(nullptr);
  create(right.op, FieldList(), TensorRTPhase::kBUILD);
  setLoggerFinder(&Log::get());
  std::fflush(stderr);
  dup2(usual, STDERR_FILENO);
  close(usual);
  std::rewind(file);
  char line[256] = "";
  const bool is_there = std::fgets(line, sizeof line, file) != nullptr;
  check(is_there &&
            !std::strcmp(line, "DustinSelectTokens: field 'budget' is missing: write one int32\n"),
        line);
  std::fclose(file);
}

}  // namespace

void test_refusals() {
  test_creators();
  test_that_right_ones_are_taken();
  test_fields();
  test_fields_that_do_not_fit();
  test_number_and_rank_of_inputs();
  test_types();
  test_sizes();
  test_limits();
  test_running();
  test_cuda_errors();
  test_what_is_known();
  test_caches_that_are_copied();
  test_other_aliases();
  test_without_a_logger();
}
