// SPDX-License-Identifier: Apache-2.0

package kernel

import "golang.org/x/sys/unix"

// filterProgram is the source of a socket filter in classic BPF (Documentation/networking/filter.rst). Each jump of the program goes
// forward to a label.
type filterProgram struct {
	list   []unix.SockFilter
	labels map[string]int
	jumps  map[int]string // target label of each jump
}

// netlinkAttribute is SKF_AD_OFF + SKF_AD_NLATTR of include/uapi/linux/filter.h. A BPF load instruction with this offset searches the
// message for a netlink attribute.
const netlinkAttribute = 0xffff_f000 + 12

func newProgram() *filterProgram {
	return &filterProgram{labels: map[string]int{}, jumps: map[int]string{}}
}

func (p *filterProgram) add(code uint16, k uint32) {
	p.list = append(p.list, unix.SockFilter{Code: code, K: k})
}

func (p *filterProgram) label(name string) { p.labels[name] = len(p.list) }

func (p *filterProgram) jump(label string) {
	p.jumps[len(p.list)] = label
	p.add(unix.BPF_JMP|unix.BPF_JA, 0)
}

// jumpIf adds a conditional jump to a label of the socket filter. The jump compares the loaded number with value. The argument "test"
// selects the comparison: BPF_JEQ, BPF_JGT, BPF_JGE or BPF_JSET.
func (p *filterProgram) jumpIf(test uint16, value uint32, label string) {
	p.jumps[len(p.list)] = label
	p.add(unix.BPF_JMP|unix.BPF_K|test, value)
}

// loadBytes adds an instruction that loads one or two bytes of the message.
func (p *filterProgram) loadBytes(at uint32, size int) {
	p.add(map[int]uint16{1: unix.BPF_B, 2: unix.BPF_H}[size]|unix.BPF_LD|unix.BPF_ABS, at)
}

// loadAttribute adds instructions that search the message for an attribute of the given type, starting at the given offset. The
// instructions load the offset of the attribute, or 0 if the attribute is missing.
func (p *filterProgram) loadAttribute(kind, from uint32) {
	p.add(unix.BPF_LDX|unix.BPF_IMM, kind)
	p.add(unix.BPF_LD|unix.BPF_IMM, from)
	p.add(unix.BPF_LD|unix.BPF_B|unix.BPF_ABS, netlinkAttribute)
}

// returnBytes adds an instruction that ends the filter. The argument "passes" is the number of bytes that the socket receives from the
// message. If "passes" is 0, the socket drops the message.
func (p *filterProgram) returnBytes(passes uint32) { p.add(unix.BPF_RET|unix.BPF_K, passes) }

func (p *filterProgram) assemble() []unix.SockFilter {
	for at, label := range p.jumps {
		skip := p.labels[label] - at - 1
		if p.list[at].Code == unix.BPF_JMP|unix.BPF_JA {
			p.list[at].K = uint32(skip)
		} else {
			p.list[at].Jt = uint8(skip)
		}
	}
	return p.list
}
