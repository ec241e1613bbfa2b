// `decoder_layers.cu` on a CPU.
#include "emulated.h"

#include "decoder_layers.cu"

static Round emulated_round;

static void emulated_kernel(void) { decoder_layers(emulated_round); }

void emulate_decoder_layers(const Round *round, int blocks) {
    emulated_round = *round;
    emulate(emulated_kernel, blocks, THREADS);
}
