// Attention of one layer as a call of its own.
#include "attention.h"

extern "C" {

int64_t forerun_abi_version() { return forerun::kAbiVersion; }

int64_t forerun_attention_workspace(const forerun::AttentionParams *params) {
  return forerun::Workspace(*params).floats(*params);
}

void forerun_attention(const forerun::AttentionParams *params) {
  using namespace forerun;
  Meeting meeting;
#pragma omp parallel num_threads(params->num_threads)
  params->dtype == kBFloat16 ? attend<bf16>(*params, Team{meeting})
                             : attend<float>(*params, Team{meeting});
}
}
