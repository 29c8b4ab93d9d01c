//! What the trace is told of a message.

use super::{Life, Outcome, Side, State};
use crate::node::Message;
use crate::plan::Plan;
use crate::trace;
use crate::trace::record::{self, Moment};

impl Life {
    /// The trace, if there is one, follows it from now on. `comm`: identity of its communicator; 0: not known.
    #[inline]
    pub fn trace(&mut self, comm: u64, about: impl FnOnce() -> record::Message) {
        if trace::on() {
            let about = record::Message {
                state: self.state.kind() as u8,
                ..about()
            };
            self.traced = trace::message(about, comm);
            if self.protocol.is_some() {
                self.tell_trace();
            }
        }
    }

    /// The same of a message that goes by RTS.
    #[inline]
    pub fn trace_message(&mut self, message: &Message, nonce: u64) {
        let (side, peer) = match self.side {
            Side::Sender => (record::Side::Sender, message.destination),
            Side::Receiver => (record::Side::Receiver, message.source),
        };
        self.trace(message.communicator, || record::Message {
            peer: peer as i32,
            tag: message.tag,
            nonce,
            ..trace::about(side, message.length)
        });
    }

    /// It has come to a receive that was posted then.
    #[inline]
    pub fn trace_post(&self, post: trace::Post) {
        if self.traced.is_any() {
            trace::posted(self.traced, post);
        }
    }

    /// Copies that are made until this is dropped are its own, for the trace.
    #[inline]
    pub fn copies(&self) -> trace::CopiesOf {
        trace::copies_of(self.traced)
    }

    /// It comes by a plan: the trace is told what is expected of it.
    pub fn trace_plan(&self, plan: &Plan) {
        if self.traced.is_any() {
            let mut bytes = [0; 3];
            for path in plan.paths() {
                bytes[path.path.kind() as usize] += path.bytes;
            }
            trace::planned(self.traced, (plan.predicted_us * 1e3) as u64, bytes);
        }
    }

    /// It has entered a state.
    #[cold]
    pub(super) fn tell_trace(&mut self) {
        let protocol = self.protocol.map_or(0, |protocol| protocol as u8 + 1);
        let kind = self.state.kind();
        let moment = match self.state {
            State::Done(outcome) => {
                let outcome = match outcome {
                    Outcome::Complete => record::Outcome::Complete,
                    Outcome::Failed => record::Outcome::Failed,
                    Outcome::Cancelled => record::Outcome::Cancelled,
                };
                trace::over(self.traced, kind as u8, protocol, outcome);
                self.traced = trace::Followed::NONE;
                return;
            }
            State::Matched => Some(Moment::Matched),
            State::Moving(_) => Some(Moment::Moving),
            State::Landed => Some(Moment::Landed),
            _ => None,
        };
        trace::change(self.traced, kind as u8, protocol, moment);
    }
}
