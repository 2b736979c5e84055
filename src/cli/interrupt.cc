#include "cli/interrupt.h"

#include <csignal>

namespace kvcell::cli {
namespace {

volatile std::sig_atomic_t g_signal = 0;

volatile std::sig_atomic_t g_hangup = 0;

extern "C" void OnHangup(int) { g_hangup = 1; }
extern "C" void OnSignal(int number) { g_signal = number; }

}  // namespace

void CatchInterrupts() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  sigemptyset(&action.sa_mask);
  // No SA_RESTART: a read of the terminal returns. SA_RESETHAND: the second Ctrl-C acts as if there were no handler.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGHUP, &action, nullptr);
}

int InterruptSignal() { return g_signal; }

void CatchHangups() {
  struct sigaction action = {};
  action.sa_handler = OnHangup;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  sigaction(SIGHUP, &action, nullptr);
}

bool TakeHangup() {
  const bool came = g_hangup != 0;
  g_hangup = 0;
  return came;
}

void ClearInterrupt() {
  g_signal = 0;
  CatchInterrupts();
}

}  // namespace kvcell::cli
