// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// processors tells what all of them did since the machine was started. A shaper sends what waits when a timer rings: that work is done on top of
// whatever runs, mostly of nothing, and is charged to nobody then.
type processors struct {
	at     time.Time
	count  int
	idle   time.Duration
	others time.Duration // of processes that have nothing to do with it
	own    time.Duration // what was charged to this one, and to soft interrupts
}

func readProcessors() (processors, error) {
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return processors{}, fmt.Errorf("read what processors did: %w", err)
	}
	p := processors{at: time.Now()}
	if p.count, p.idle, err = idleTime(stat); err != nil {
		return p, fmt.Errorf("read what processors did: %w", err)
	}
	own := strconv.AppendInt(nil, int64(unix.Getpid()), 10)
	p.others, err = processTime(func(stat []byte) bool { return !softirq(stat) && !bytes.HasPrefix(stat, append(own, ' ')) })
	if err == nil {
		p.own, err = cpuTime()
	}
	return p, err
}

// idleTime counts the processors of /proc/stat and adds what they idled. Waiting for a disk is idle too.
func idleTime(stat []byte) (count int, idle time.Duration, err error) {
	for line := range bytes.Lines(stat) {
		fields := bytes.Fields(line)
		if !bytes.HasPrefix(line, []byte("cpu")) || bytes.HasPrefix(line, []byte("cpu ")) || len(fields) < 6 {
			continue
		}
		ticks, err := sumOf(fields[4:6])
		if err != nil {
			return 0, 0, err
		}
		count++
		idle += time.Duration(ticks) * time.Second / userHZ
	}
	return count, idle, nil
}

// since is the time that processors spent on this process and on packets: what nobody else did, but not less than was charged for it. It is 0
// where a process for which nobody waited took the times of all its children with it.
func (p processors) since(before processors) time.Duration {
	others := p.others - before.others
	if others < 0 {
		return 0
	}
	return max(time.Duration(p.count)*p.at.Sub(before.at)-(p.idle-before.idle)-others, p.own-before.own)
}

// spending begins to count after a while. What it returns ends that.
func spending(after time.Duration) func() (time.Duration, error) {
	type reading struct {
		processors
		err error
	}
	begin := make(chan reading, 1)
	time.AfterFunc(after, func() {
		p, err := readProcessors()
		begin <- reading{p, err}
	})
	return func() (time.Duration, error) {
		end, err := readProcessors()
		if begun := <-begin; err == nil && begun.err == nil {
			return end.since(begun.processors), nil
		} else if err == nil {
			err = begun.err
		}
		return 0, err
	}
}
