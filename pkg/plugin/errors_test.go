// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

type (
	featureless struct{ error }
	busy        struct{ error }
)

func (featureless) MissingFeature() string { return "x" }
func (busy) Busy() bool                    { return true }

func TestCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want uint
	}{
		{errors.New("x"), CodeIO},
		{fs.ErrPermission, CodeIO},
		{Errorf(CodeConfig, "x"), CodeConfig},
		{fmt.Errorf("outer: %w", Errorf(CodeDecode, "x")), CodeDecode},
		{Errorf(CodeDevice, "outer: %w", Errorf(CodeDecode, "x")), CodeDevice},
		{errors.Join(errors.New("x"), Errorf(CodeExhausted, "y")), CodeExhausted},
		{fmt.Errorf("link add: %w", unix.EBUSY), CodeTryAgain},
		{fmt.Errorf("link add: %w", unix.EAGAIN), CodeTryAgain},
		{fmt.Errorf("link add: %w", unix.EINTR), CodeTryAgain},
		{fmt.Errorf("link add: %w", unix.EOPNOTSUPP), CodeKernelFeature},
		{fmt.Errorf("link add: %w", unix.EPERM), CodeIO},
		{WithHint(Errorf(CodeConfig, "x"), "do y"), CodeConfig},
		{WithHint(unix.EBUSY, "do y"), CodeTryAgain},
		{fmt.Errorf("link add: %w", featureless{unix.EBUSY}), CodeKernelFeature},
		{fmt.Errorf("link add: %w", busy{unix.EOPNOTSUPP}), CodeTryAgain},
		{Errorf(CodeDevice, "outer: %w", featureless{unix.ENOENT}), CodeDevice},
	} {
		if got := Code(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

// Error codes do not change, because runtimes, scripts and documents use them.
func TestCodes(t *testing.T) {
	want := []uint{1, 2, 3, 4, 5, 6, 7, 8, 11, 50, 51, 100, 101, 102, 103, 104, 105, 999}
	got := []uint{CodeVersion, CodeUnsupported, CodeUnknown, CodeEnvironment, CodeIO, CodeDecode, CodeConfig, CodeNetns, CodeTryAgain,
		CodeNotAvailable,
		CodeLimited, CodeStateDiffers, CodeExhausted, CodeAddressTaken, CodeDevice, CodePortConflict, CodeKernelFeature, CodeInternal}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestHint(t *testing.T) {
	if err := WithHint(nil, "x"); err != nil {
		t.Errorf("a hint alone became the error %v", err)
	}
	inner := WithHint(Errorf(CodeConfig, "bad"), "inner")
	err := WithHint(fmt.Errorf("outer: %w", inner), "outer %d", 1)
	if got := Hint(err); got != "outer 1; inner" {
		t.Errorf("got %q", got)
	}
	if err.Error() != "outer: bad" || !errors.Is(err, inner) {
		t.Errorf("the hint changed the error: %v", err)
	}
	if got := Hint(errors.New("x")); got != "" {
		t.Errorf("got %q", got)
	}
}

// runUndo runs four undo functions, some of which fail, and returns the order in which they ran.
func runUndo(start error, failing ...int) (order []int, err error) {
	err = start
	var undo Undo
	for i := range 4 {
		undo.Push(func() error {
			order = append(order, i)
			for _, f := range failing {
				if f == i {
					return fmt.Errorf("step %d", i)
				}
			}
			return nil
		})
	}
	undo.OnError(&err)
	return order, err
}

func TestUndo(t *testing.T) {
	if order, err := runUndo(nil); order != nil || err != nil {
		t.Errorf("without error: %v, %v", order, err)
	}
	start := Errorf(CodeExhausted, "full")
	order, err := runUndo(start, 3, 1)
	if diff := cmp.Diff([]int{3, 2, 1, 0}, order); diff != "" {
		t.Error(diff)
	}
	if Code(err) != CodeExhausted || !errors.Is(err, start) || err.Error() != "full\nundo: step 3\nundo: step 1" {
		t.Errorf("got %d %q", Code(err), err)
	}
	if _, err := runUndo(start); err != start {
		t.Errorf("got %v: want the error itself", err)
	}
}

// The code comes from the errno of the original error, even if an undo function fails with another one.
func TestUndoKeepsDerivedCode(t *testing.T) {
	err := error(unix.EBUSY)
	var undo Undo
	undo.Push(func() error { return Errorf(CodeConfig, "x") })
	undo.OnError(&err)
	if Code(err) != CodeTryAgain {
		t.Errorf("got code %d", Code(err))
	}
}

func TestUndoOnPanic(t *testing.T) {
	var order []string
	p := Plugin{Name: "x", Del: func(*Request) (err error) {
		var undo Undo
		defer undo.OnError(&err)
		undo.Push(func() error { order = append(order, "first"); return nil })
		undo.Push(func() error { order = append(order, "second"); return errors.New("x") })
		var none *Request
		return errors.New(none.Network)
	}}
	o := run(p, newEnv("DEL"), config(""))
	f := o.mustFail(t, CodeInternal)
	if diff := cmp.Diff([]string{"second", "first"}, order); diff != "" {
		t.Error(diff)
	}
	if !strings.Contains(f.Msg, "internal error: runtime error: invalid memory address") || !strings.Contains(f.Details, "container=pod-1") {
		t.Errorf("got %+v", f)
	}
	if !strings.Contains(o.stderr, "errors_test.go:") {
		t.Errorf("stderr does not contain the position: %s", o.stderr)
	}
}
