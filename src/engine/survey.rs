//! When a node that nobody has measured is measured.

use crate::config::Owner;
use crate::cuda::{Buffer, ContextKey};
use crate::engine::{Core, Env};
use crate::transfer::fetch::asks_for_depth;

impl Core {
    /// A buffer of the program's is to be sent or received. If nobody has measured the node, the links of its
    /// GPU are measured, and the system is asked for its NVLinks if those matter.
    pub(super) fn survey(&mut self, env: &Env, buffer: &Buffer, context: ContextKey, bytes: u64) {
        if env.may_split(bytes) && env.paths().host && env.config.owner == Owner::Two {
            self.gpu.pages.ask(env);
        }
        let are_several = self.history.mix.are_several();
        if asks_for_depth(env, bytes, are_several) && self.router.is_unmeasured(env, &buffer.uuid) {
            let may_split = env.may_split(bytes);
            if may_split {
                self.gpu.survey.meet(env, &buffer.uuid, context);
            }
            // NVLinks tell whether relays share links, and whether messages of several senders do, which is
            // why those are read in turns.
            if are_several || (may_split && env.config.paths.relay) {
                self.gpu.survey.ask_for_links(env);
            }
        }
        self.gpu.advance_survey(env);
    }
}
