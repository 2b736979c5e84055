// Ctrl-C as a request to finish the step that is under way; a second one ends the process at once.
#pragma once

namespace kvcell::cli {

// SIGINT, SIGTERM and SIGHUP set a flag from now on.
void CatchInterrupts();
// The signal that came, 0 for none.
int InterruptSignal();
// SIGHUP sets a flag from now on; TakeHangup tells whether one came since it was last asked.
void CatchHangups();
bool TakeHangup();
// Forgets it and listens for the next one.
void ClearInterrupt();

}  // namespace kvcell::cli
